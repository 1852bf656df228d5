"""Examples of the user's: what they rank and show."""
