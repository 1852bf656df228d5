"""Text generation: a chat's prompt, how the next token is picked, and where the text ends."""

from .chat import ChatTemplate
from .sampling import LogProbabilities, Sampler, Sampling, log_probabilities
from .stops import Stops, TextStream

__all__ = ["ChatTemplate", "LogProbabilities", "Sampler", "Sampling", "Stops", "TextStream", "log_probabilities"]
