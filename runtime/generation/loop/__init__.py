"""The loop that generates: prompts, rows, sessions that keep their cache, and which submodel writes a token."""
