"""Experts of fixed capacity."""
