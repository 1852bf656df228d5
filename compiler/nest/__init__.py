"""An ordinary pretrained encoder made nested: ranked, then taught by its own original."""
