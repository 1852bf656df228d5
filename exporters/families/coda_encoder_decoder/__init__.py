"""A conditional T5: an encoder with conditional adapters, and T5's dense decoder, which reads all of its tokens."""
