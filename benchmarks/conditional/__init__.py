"""Encoders with conditional adapters."""
