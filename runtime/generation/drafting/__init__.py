"""Who proposes tokens, what that is worth, and what became of it."""
