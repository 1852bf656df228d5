"""Encoders and decoders with each of the seven attentions that the MHE paper compares, trained equally."""
