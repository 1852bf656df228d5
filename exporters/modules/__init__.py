"""PyTorch modules that several families share."""
