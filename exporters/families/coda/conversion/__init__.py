"""Ordinary encoders made conditional: T5's, ViT, BERT."""
