"""What config.json says, and what follows from it without torch."""
