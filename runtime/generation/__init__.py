"""Text generation: how the next token is picked, and where the text ends."""

from .sampling import LogProbabilities, Sampler, Sampling, log_probabilities
from .stops import Stops, TextStream

__all__ = ["LogProbabilities", "Sampler", "Sampling", "Stops", "TextStream", "log_probabilities"]
