"""Bundles behind standard protocols: one queue before them, and what each protocol says."""
