"""What a call asks for and keeps: prompts, rows, options, sessions, and the submodel for each token."""
