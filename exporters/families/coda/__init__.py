"""Encoders with conditional adapters: only k of n tokens pass through a layer."""
