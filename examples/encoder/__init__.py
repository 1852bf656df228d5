"""The demo: a real checkpoint compiled for this machine. Not part of the wheel."""
