"""Selected tokens read out of all, and what was made of them added back. A token is selected at most once, so that no
two additions meet.

Shapes: ``B`` rows of ``n`` tokens of width ``d``, of which ``places`` [B, k] are selected.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from ....tracing.add_rows import add_rows
from ....tracing.token_rows import one_hot, table_rows
from ..architecture.variant_ops import COMBINE, DISPATCH


class Rows:
    """As the model is written: by rows of one table of all tokens, which torch moves and differentiates whole; by
    places of single numbers a step of training took a third longer."""

    def read(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """``tokens`` [B, n, d] to the selected ones [B, k, d]."""
        return functional.embedding(table_rows(places, tokens.shape[1]), tokens.flatten(0, 1))

    def add(self, tokens: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``tokens`` [B, n, d] with ``values`` [B, k, d] added to the selected ones."""
        rows = table_rows(places, tokens.shape[1]).flatten()
        return tokens.flatten(0, 1).index_add(0, rows, values.flatten(0, 1)).view_as(tokens)


class TracedRows(Rows):
    """The same in the variants ``coda.dispatch`` and ``coda.combine`` of an engine."""

    def __init__(self, variants: Mapping[str, str]) -> None:
        self.dispatch, self.combine = variants[DISPATCH], variants[COMBINE]

    def read(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        if self.dispatch == "one_hot":
            return one_hot(places, tokens.shape[1]) @ tokens
        return super().read(tokens, places)

    def add(self, tokens: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if self.combine == "one_hot":
            return tokens + one_hot(places, tokens.shape[1]).transpose(1, 2) @ values
        rows = table_rows(places, tokens.shape[1])
        added: torch.Tensor = add_rows(tokens.flatten(0, 1), rows.flatten(), values.flatten(0, 1))
        return added.view_as(tokens)
