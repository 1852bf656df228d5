"""Multi-head self-attention whose first ``k`` heads are an attention of their own.

The number of heads is read off the weights, so a narrowed copy needs no attribute mended; the head size, and with it
the scale ``1 / sqrt(head_dim)``, never changes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from .positions import Positions

# What queries read of keys and values, all [B, A, S, D], given what is added to scores.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


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
        heads: int | None = None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H] through the first ``heads`` heads, by default all that the module holds.

        ``mask``, [S, S] or what broadcasts to [B, A, S, S], is added to every score; ``positions`` turns queries and
        keys. ``attend`` takes the place of attention over these tokens alone.
        """
        whole = self.query.weight.shape[0] // self.head_dim
        if heads is not None and not 1 <= heads <= whole:
            raise ValueError(f"heads {heads}: expected 1..{whole}")
        inner = None if heads is None else heads * self.head_dim
        query, key, value = (
            _first_rows(part, hidden, inner).view(*hidden.shape[:2], -1, self.head_dim).transpose(1, 2)  # [B, A, S, D]
            for part in (self.query, self.key, self.value)
        )
        if positions is not None:
            query, key = positions(query), positions(key)
        if attend is not None:
            context = attend(query, key, value, mask)
        else:
            context = functional.scaled_dot_product_attention(query, key, value, mask, scale=self.head_dim**-0.5)
        merged = context.transpose(1, 2).flatten(2)  # [B, S, A * D]
        if inner is None:
            updated: torch.Tensor = self.output(merged)
            return updated
        return functional.linear(merged, self.output.weight[:, :inner], self.output.bias)


def _first_rows(layer: torch.nn.Linear, x: torch.Tensor, rows: int | None) -> torch.Tensor:
    if rows is None:
        projected: torch.Tensor = layer(x)
        return projected
    return functional.linear(x, layer.weight[:rows], None if layer.bias is None else layer.bias[:rows])
