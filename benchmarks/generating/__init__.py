"""Benchmarks of text generation."""
