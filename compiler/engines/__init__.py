"""Engines emitted, proven and measured."""
