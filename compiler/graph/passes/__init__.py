"""Graph passes, from a trace to a template: their contract, and a file for each concern."""
