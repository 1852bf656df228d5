"""Bundles in the forms of other platforms."""
