"""Adaptive retrieval: a corpus indexed by the universal model, queries answered by any of its submodels."""
