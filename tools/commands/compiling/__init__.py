"""Commands from a checkpoint to a verified bundle."""
