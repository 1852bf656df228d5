"""Folders of checkpoints, read without torch."""
