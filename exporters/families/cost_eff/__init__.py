"""Multi-exit, slenderised encoders: the folder format, the reference model and what one pass costs."""
