"""Folders of Hugging Face, and the classes of transformers that they name."""
