"""Inputs of a request: arrays and texts, checked and filled."""
