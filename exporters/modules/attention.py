"""Attention whose first ``k`` heads are an attention of their own, which keys a query sees, and rotary positions.

The number of heads is read off the weights, so a narrowed copy needs no attribute mended; the head size, and with it
the scale ``1 / sqrt(head_dim)``, never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

ROTARY_BASE = 10_000.0

# A change of queries and keys [B, A, S, D] for their positions.
Positions = Callable[[torch.Tensor], torch.Tensor]


def additive_mask(is_seen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``is_seen`` (bool, any shape) to the same shape in the dtype of ``like``: 0 where a key is seen.

    The lowest finite number of float32, or of a narrower ``like``, elsewhere: it takes up every score. Not minus
    infinity, so that a query that sees nothing gets the mean of all values and no graph needs a guard against NaN.
    """
    lowest = max(torch.finfo(like.dtype).min, torch.finfo(torch.float32).min)
    return torch.where(is_seen, 0.0, lowest).to(like.dtype)


def causal_mask(length: int, like: torch.Tensor) -> torch.Tensor:
    """``[S, S]`` in the dtype of ``like``, added to scores: 0 where a query may see a key."""
    place = torch.arange(length, device=like.device)
    return additive_mask(place[:, None] >= place[None, :], like)


def hidden_beyond(lengths: torch.Tensor, most: int) -> torch.Tensor:
    """Mask added to scores of ``most`` tokens, [B, 1, 1, most]: 0 for the first ``lengths`` [B] of a row, and the
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


# Attention of queries [B, A, S, D] over keys and values [B, K, N, D], given what is added to scores or nothing, and
# what scores are multiplied by: [B, A, S, D].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]


class NestedAttention(torch.nn.Module):
    """Projections ``query``, ``key``, ``value`` [A * D, H] and ``output`` [H, A * D]; heads are blocks of D rows."""

    def __init__(self, hidden: int, heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        inner = heads * head_dim
        self.query, self.key, self.value = (torch.nn.Linear(hidden, inner, bias=bias) for _ in range(3))
        self.output = torch.nn.Linear(inner, hidden, bias=bias)

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None = None,
        positions: Positions | None = None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H].

        ``mask``, [S, S] or what broadcasts to [B, A, S, S], is added to every score; ``positions`` turns queries and
        keys. ``attend`` takes the place of attention over these tokens alone.
        """
        query, key, value = (
            part(hidden).view(*hidden.shape[:2], -1, self.head_dim).transpose(1, 2)  # [B, A, S, D]
            for part in (self.query, self.key, self.value)
        )
        if positions is not None:
            query, key = positions(query), positions(key)
        if attend is not None:
            context = attend(query, key, value, mask, self.head_dim**-0.5)
        else:
            context = functional.scaled_dot_product_attention(query, key, value, mask, scale=self.head_dim**-0.5)
        updated: torch.Tensor = self.output(context.transpose(1, 2).flatten(2))  # [B, S, A * D]
        return updated
