"""What config.json says of an encoder with conditional adapters, and what follows from it without torch."""
