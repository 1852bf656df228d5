"""Tokens in groups as rows of one table, for graphs that read and write them by index, or as products with ones.

Shapes: ``G`` groups (or rows of a batch) of ``T`` tokens of width ``d``; ``places`` hold tokens of their group.
"""

from __future__ import annotations

import torch


def table_rows(places: torch.Tensor, tokens: int) -> torch.Tensor:
    """``places`` [G, ...] in groups of ``tokens`` as rows of the table [G * T, d] of all, in the same shape."""
    groups = places.shape[0]
    if groups == 1:
        return places
    return places + tokens * torch.arange(groups, device=places.device).view(groups, *(1 for _ in places.shape[1:]))


def one_hot(places: torch.Tensor, tokens: int) -> torch.Tensor:
    """``places`` [G, C] to [G, C, T]: 1 where a place holds a token."""
    return (places[..., None] == torch.arange(tokens)).float()
