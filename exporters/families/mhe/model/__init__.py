"""MHE models in PyTorch, and their attention in other forms."""
