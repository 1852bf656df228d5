"""Engines of any backend: opened, kept, measured."""
