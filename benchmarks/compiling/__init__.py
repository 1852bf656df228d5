"""What a compile makes, and how long it takes."""
