"""Training of the masked-token example: Sparse Mixers with either router, and the BERT that they are compared with."""
