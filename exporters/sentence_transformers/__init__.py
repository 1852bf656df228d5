"""Folders of sentence-transformers: what its modules compute behind the transformer, and how it prepares a text."""
