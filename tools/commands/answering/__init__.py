"""Commands that ask a bundle: for answers, for text, for what is nearest."""
