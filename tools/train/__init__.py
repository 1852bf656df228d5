"""A real multi-exit model, trained here: all-MiniLM-L6-v2 with six exits, then slenderised. Not part of the wheel."""
