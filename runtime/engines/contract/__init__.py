"""What every backend keeps to."""
