"""Trains the models that the demonstrations compile: no part of the product, only of its checkout."""
