"""Hugging Face vision transformers: what their folder says (architecture.py), and loading one (load.py)."""
