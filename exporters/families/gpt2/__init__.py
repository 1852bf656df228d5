"""GPT-2: its shape from config.json, and what one pass costs (no torch here)."""
