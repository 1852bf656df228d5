"""Templates of other precisions, derived graph by graph from the float32 ones."""
