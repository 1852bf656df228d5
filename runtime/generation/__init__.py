"""Text generation: how the next token is picked."""

from .sampling import LogProbabilities, Sampler, Sampling, log_probabilities

__all__ = ["LogProbabilities", "Sampler", "Sampling", "log_probabilities"]
