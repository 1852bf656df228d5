"""Relative position biases as in T5, for a causal model: one learned number per head and bucket of distances.

Keys nearer than half the buckets have one each; further ones share buckets that grow with the logarithm of the
distance, and from ``RELATIVE_REACH`` tokens on all share the last. Stored ``[A, buckets]``, so that the first heads are
a prefix.
"""

from __future__ import annotations

import torch

from ....hugging_face.tensors import RELATIVE_BUCKETS, RELATIVE_REACH, distance_bucket


class RelativeBias(torch.nn.Module):
    """``weight`` [A, 32], looked up by bucket."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(heads, RELATIVE_BUCKETS))

    def forward(self, buckets: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """``buckets`` int64 of any shape, such as [S, S], to what the first ``heads`` heads, by default all, add to
        their scores, [A, S, S]."""
        chosen = self.weight[:heads].index_select(1, buckets.flatten())  # [A, S * S]
        return chosen.view(-1, *buckets.shape)


def distance_buckets(length: int, device: torch.device) -> torch.Tensor:
    """Bucket of every query and key, ``[S, S]`` int64; keys behind their query, which it does not see, are in 0."""
    place = torch.arange(length, device=device)
    return buckets_between(place, place)


def buckets_between(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Bucket of each of ``queries``, places [..., S] int64, and each of ``keys`` [T], ``[..., S, T]`` int64."""
    distance = (queries[..., None] - keys).clamp(min=0, max=RELATIVE_REACH)
    buckets = [distance_bucket(step, RELATIVE_BUCKETS, RELATIVE_REACH) for step in range(RELATIVE_REACH + 1)]
    by_distance = torch.tensor(buckets, device=keys.device)
    return by_distance.index_select(0, distance.flatten()).view(distance.shape)
