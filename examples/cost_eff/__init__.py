"""Training of the multi-exit example: from all-MiniLM-L6-v2 to a slender model with exits (COST-EFF)."""
