"""Attention in which queries may be some of the tokens, and heads may share keys and values.

Shapes: ``B`` rows, ``q`` tokens that ask, ``m`` that are read, ``H`` hidden, ``n`` heads of size ``d``, ``K`` heads of
keys and values; head i reads those of head ``i // (n / K)``.
"""

from __future__ import annotations

import torch

from ....modules.positions import Positions
from ..architecture.config import CodaConfig
from .adapters import LowRank


class Attention(torch.nn.Module):
    """Projections ``query`` [n * d, H], ``key`` and ``value`` [K * d, H], ``output`` [H, n * d]."""

    def __init__(self, config: CodaConfig) -> None:
        super().__init__()
        self.head_size, self.shared, self.scale = config.head_size, config.key_value_heads, config.scale
        hidden, inner = config.hidden_size, config.num_attention_heads * config.head_size
        self.query = torch.nn.Linear(hidden, inner, config.bias)
        self.key, self.value = (torch.nn.Linear(hidden, self.shared * config.head_size, config.bias) for _ in range(2))
        self.output = torch.nn.Linear(inner, hidden, config.bias)

    def forward(
        self,
        asking: torch.Tensor,
        read: torch.Tensor,
        added: torch.Tensor | None,
        turn_queries: Positions | None,
        turn_keys: Positions | None,
        low_rank: LowRank | None = None,
    ) -> torch.Tensor:
        """``asking`` [B, q, H] and ``read`` [B, m, H] to [B, q, H]; ``added``, which broadcasts to [B, n, q, m], is
        added to every score, if there is any, ``low_rank`` to queries and values."""
        queries, values = self.query(asking), self.value(read)
        if low_rank is not None:
            queries, values = queries + low_rank.query(asking), values + low_rank.value(read)
        query, key, value = (self._heads(projected) for projected in (queries, self.key(read), values))
        if turn_queries is not None and turn_keys is not None:
            query, key = turn_queries(query), turn_keys(key)
        rows, heads, asked, size = query.shape
        seen, together = key.shape[2], heads // self.shared * asked
        # Queries of heads that share keys are one product with them.
        folded = (query * self.scale).reshape(rows, self.shared, together, size)  # [B, K, n / K * q, d]
        scores = (folded @ key.transpose(-1, -2)).view(rows, heads, asked, seen)
        scores = scores if added is None else scores + added
        context = scores.softmax(-1).view(rows, self.shared, together, seen) @ value
        merged = context.view(rows, heads, asked, size).transpose(1, 2).flatten(2)  # [B, q, n * d]
        updated: torch.Tensor = self.output(merged)
        return updated

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """[B, m, A * d] to [B, A, m, d]."""
        return projected.view(*projected.shape[:2], -1, self.head_size).transpose(1, 2)
