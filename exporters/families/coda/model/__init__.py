"""The model in PyTorch, and as the compiler traces it."""
