"""Training of MatFormer's universal models, and the paper's comparison with models trained for one size each."""
