"""What a bundle holds, as tables for people."""
