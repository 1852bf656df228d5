"""Adaptive retrieval: a corpus indexed by the universal model, queries answered by any of its submodels."""

from .compare import Comparison, SubmodelFigures, compare_submodels
from .index import Found, Index

__all__ = ["Comparison", "Found", "Index", "SubmodelFigures", "compare_submodels"]
