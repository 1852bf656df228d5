"""Sparse Mixer encoders: token mixing, experts of fixed capacity, and the variants in which engines compute them."""
