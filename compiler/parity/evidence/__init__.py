"""The cases of the gate, what PyTorch answers to them, and how far an engine's numbers are from that."""
