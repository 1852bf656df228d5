"""Graphs: templates, the weight store, passes, precisions."""
