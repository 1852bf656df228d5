"""T5 and its gated form (v1.1): an encoder, and the decoder that reads it. What a folder says, what a pass costs."""
