"""What attention knows about places: which of them a token sees, and rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .additive_mask import additive_mask

ROTARY_BASE = 10_000.0
# What is done to queries and keys [B, A, S, D] for their positions.
Positions = Callable[[torch.Tensor], torch.Tensor]


def causal_mask(length: int, like: torch.Tensor) -> torch.Tensor:
    """``[S, S]`` in the dtype of ``like``, added to scores: 0 where a query may see a key."""
    place = torch.arange(length, device=like.device)
    return additive_mask(place[:, None] >= place[None, :], like)


def hidden_beyond(lengths: torch.Tensor, most: int) -> torch.Tensor:
    """What is added to scores of ``most`` tokens, [B, 1, 1, most]: 0 for the first ``lengths`` [B] of a row, and the
    lowest number behind them."""
    is_seen = torch.arange(most) < lengths[:, None]
    return torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[:, None, None, :]


def rotary(places: torch.Tensor, head_dim: int) -> Positions:
    """Rotary positions at ``places`` [S], or [B, 1, S]: the first half of each head is turned against the second."""
    half = head_dim // 2
    rates = ROTARY_BASE ** -(torch.arange(half, device=places.device, dtype=torch.float32) / half)  # [D / 2]
    angles = places.to(torch.float32)[..., None] * rates  # [S, D / 2]
    cos, sin = angles.cos(), angles.sin()
    return partial(_turn, cos=torch.cat((cos, cos), -1), sin=torch.cat((-sin, sin), -1))


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [B, A, S, D], turned by the angles of its positions: ``cos`` and signed ``sin`` [S, D] or [B, 1, S, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((second, first), dim=-1) * sin.to(x.dtype)
