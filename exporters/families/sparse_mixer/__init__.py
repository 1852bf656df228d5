"""Sparse Mixer encoders: token mixing, experts of fixed capacity, and the forms in which engines compute them."""
