"""Attention of T5's kin, which adds to scores what the distance of two tokens says: by the bucket of the distance, and
by the keyword ``BIAS`` of transformers' interface."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import ExportError
from ..modules.attention import CachePlaces, tokens_so_far
from .tensors import MOST_REACH
from .transformers_internals import DISTANCE_BUCKETS

BIAS = "position_bias"


def biased_parts(model: Any) -> list[Any]:
    """The parts of ``model`` that make such biases, of distances in buckets: attention of T5's kin."""
    parts = (part for part in model.modules() if hasattr(part, DISTANCE_BUCKETS))
    return [part for part in parts if part.has_relative_attention_bias]


def look_up_distances(model: Any) -> None:
    """Makes ``biased_parts`` look buckets up, in a table of what their class's own function returns.

    Between two buckets the logarithm of a distance is a whole number, which its last bit decides: an engine's logarithm
    may have another. Raises ExportError for more distances than a table should have.
    """
    for part in biased_parts(model):
        farthest = part.relative_attention_max_distance
        if farthest > MOST_REACH:
            raise ExportError(f"relative_attention_max_distance: expected at most {MOST_REACH}, got {farthest}")
        buckets = getattr(part, DISTANCE_BUCKETS)
        own = inspect.signature(buckets).parameters
        stated = {
            "bidirectional": not getattr(part, "is_decoder", True),
            "num_buckets": part.relative_attention_num_buckets,
            "max_distance": farthest,
        }
        table = buckets(
            torch.arange(-farthest, farthest + 1), **{name: each for name, each in stated.items() if name in own}
        )

        def bucket_of(
            distance: torch.Tensor, *, table: torch.Tensor = table, farthest: int = farthest, **_: Any
        ) -> torch.Tensor:
            """Buckets of ``distance``, both int64 of any shape; all that are farther share the last ones."""
            return table[distance.clamp(-farthest, farthest) + farthest]

        # In the place of the class's own function, which a submodule of this name would not hide.
        part.__dict__[DISTANCE_BUCKETS] = bucket_of


@contextmanager
def biased_at(model: Any, position_ids: torch.Tensor, places: CachePlaces) -> Iterator[None]:
    """Within it ``biased_parts``, which count distances from what a cache says of all rows at once, make biases
    [B, A, S, T] of new tokens at ``position_ids`` [B, S] to all of the longest row, as ``places`` has them."""
    parts = biased_parts(model)
    for part in parts:

        def bias(*_: Any, part: Any = part, **__: Any) -> torch.Tensor:
            distance = tokens_so_far(places) - position_ids[:, :, None]  # [B, S, T]
            found: torch.Tensor = part.relative_attention_bias(getattr(part, DISTANCE_BUCKETS)(distance))
            return found.permute(0, 3, 1, 2)

        part.compute_bias = bias
    try:
        yield
    finally:
        for part in parts:
            del part.compute_bias
