"""Bundles behind the interfaces of other libraries: what sentence-transformers and transformers are asked for."""

from .sentence_encoder import SentenceEncoder
from .text_classifier import TextClassifier

__all__ = ["SentenceEncoder", "TextClassifier"]
