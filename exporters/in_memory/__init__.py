"""Modules of PyTorch that no folder holds."""
