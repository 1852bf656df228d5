"""Which engine answers how many rows: what engines take at a size, by figures and by their own runs."""
