"""Attention as the paper writes it (sections 2.1 to 2.4), for every kind that it compares.

The number of heads, or of their numbers, is read off the weights, so that a narrowed copy needs no attribute mended;
scores are multiplied by one number for all of them.

Shapes: ``B`` rows, ``S`` tokens, ``N`` tokens that they read, ``H`` hidden, ``n`` heads of size ``d``; ``K`` heads of
keys and values, ``n`` or one that all share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...modules.attention import Positions
from .config import MheConfig
from .shapes import ROLES, attention_shapes, table

# Keys and values [B, K, N, d] that queries read, of the same tokens or of others.
Kept = tuple[torch.Tensor, torch.Tensor]
# What queries [B, n, S, d] read of keys and values [B, K, N, d], given what is added to scores, [1 or B, 1, 1 or S, N]
# or nothing, and what scores are multiplied by: [B, n, S, d].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]


class Attention(torch.nn.Module):
    """One sublayer of the configured kind; every projection and table under the name that ``attention_shapes`` has."""

    # What the kind has of these.
    query: torch.nn.Linear
    key: torch.nn.Linear
    value: torch.nn.Linear
    key_value: torch.nn.Linear
    output: torch.nn.Linear
    embedding: torch.nn.ParameterDict
    factor: torch.nn.ParameterDict

    def __init__(self, config: MheConfig) -> None:
        super().__init__()
        self.config = config
        shapes = attention_shapes(config, "")
        for name, shape in shapes.items():
            part, _, kind = name.removeprefix(".").rpartition(".")
            if kind == "weight":
                setattr(self, part, torch.nn.Linear(shape[1], shape[0], bias=f".{part}.bias" in shapes))
        if config.has_tables:
            tables = {role: torch.nn.Parameter(torch.zeros(shapes[f".{table(config)}.{role}"])) for role in ROLES}
            setattr(self, table(config), torch.nn.ParameterDict(tables))

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None = None,
        turn: Positions | None = None,
        attend: Attend | None = None,
        kept: Kept | None = None,
    ) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H]. ``turn`` turns queries and keys by their positions, after their head
        embeddings; ``attend`` takes the place of attention over these tokens alone. In cross-attention ``kept`` is what
        the method of that name made of what is read."""
        query = self._queries(hidden)
        key, value = kept or self.kept(hidden, turn)
        if turn is not None:
            query = turn(query)
        context = (attend or attend_to_all)(query, key, value, mask, self.config.scale)
        if self.config.attention == "sha":  # one head, which the output projection reads as often as it has blocks
            context = context.repeat(1, self.config.num_attention_heads, 1, 1)
        updated: torch.Tensor = self.output(joined(context.transpose(1, 2), self.config))
        return updated

    def kept(self, hidden: torch.Tensor, turn: Positions | None = None) -> Kept:
        """The keys and values [B, K, S, d] of ``hidden`` [B, S, H], of which a cache has these."""
        match self.config.attention:
            case "skv":
                key = value = self._split(self.key_value(hidden), "key_value")
            case "el_att":
                key = value = self._split(hidden, "query")
            case _:
                key, value = self._split(self.key(hidden), "key"), self._split(self.value(hidden), "value")
        if self.config.has_tables:
            key, value = self._told_apart(key, "key"), self._told_apart(value, "value")
        return (key if turn is None else turn(key)), value

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, n, S, d]."""
        query = self._split(self.query(hidden), "query")
        return self._told_apart(query, "query") if self.config.has_tables else query

    def factors(self, role: str) -> torch.Tensor:
        """``s = 1 + e`` of every head of mhe_mul, [n, d], however it is stored."""
        tables = getattr(self, table(self.config))
        factors = by_head(tables[role], self.config)
        return factors if self.config.factors == "1+e" else factors + 1

    def embeddings(self, role: str) -> torch.Tensor:
        """``e`` of every head of mhe_add, [n, d]."""
        return by_head(self.embedding[role], self.config)

    def _split(self, projected: torch.Tensor, part: str) -> torch.Tensor:
        """Output of the projection ``part``, [B, S, K * d], to [B, K, S, d]."""
        return split(projected, self.config, part not in self.config.own_projections).transpose(1, 2)

    def _told_apart(self, seed: torch.Tensor, role: str) -> torch.Tensor:
        """Section 2.2: ``seed`` [B, 1, S, d] with the head embeddings, [B, n, S, d]."""
        if self.config.attention == "mhe_mul":
            return seed * self.factors(role)[:, None]
        return seed + self.embeddings(role)[:, None]


def attend_to_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Scaled dot-product attention over these tokens: see ``Attend``."""
    scores = (query * scale) @ key.transpose(-1, -2)  # [B, n, S, S]
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value


def split(projected: torch.Tensor, config: MheConfig, is_shared: bool = False) -> torch.Tensor:
    """A projection's output, [B, S, K * d], as a vector of each of its heads, [B, S, K, d]; ``K`` is ``n``, or 1 of
    one that all heads share. What may shrink is read off the tensor."""
    if not config.width_first:
        return projected.view(*projected.shape[:2], -1, config.head_size)
    heads = 1 if is_shared else config.num_attention_heads
    return projected.view(*projected.shape[:2], -1, heads).transpose(2, 3)


def joined(context: torch.Tensor, config: MheConfig) -> torch.Tensor:
    """Head outputs, [B, S, n, d], as the output projection takes it, [B, S, n * d]."""
    return (context.transpose(2, 3) if config.width_first else context).flatten(2)


def by_head(table: torch.Tensor, config: MheConfig) -> torch.Tensor:
    """A table of head embeddings as [n, d], or such numbers as a table."""
    return table.T if config.width_first else table


def rows_of(by_heads: torch.Tensor, config: MheConfig) -> torch.Tensor:
    """[n, d, ...] as the rows of a projection, [n * d, ...]."""
    return (by_heads.transpose(0, 1) if config.width_first else by_heads).flatten(0, 1)
