"""Engines and the runtime that opens and asks them."""
