"""Parity of exports that others made: opened, asked, judged beside their model, and where they go wrong."""
