"""What a request brings: arrays and texts, checked and filled."""
