"""Gated-FFN decoders of Hugging Face: their shape from config.json, and what one pass costs (no torch here)."""
