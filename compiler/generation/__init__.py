"""Engines that generate: made, and proven on texts given to them in pieces."""
