"""How the numbers of all heads lie in one dimension of a tensor: head by head, or number by number.

What stands in front is what may shrink: the first heads, or the first numbers of every head, are then the first rows of
a projection, and one range of bytes. Shapes: ``B`` rows, ``S`` tokens, ``n`` heads of size ``d``.
"""

from __future__ import annotations

import torch

from ..architecture.config import MheConfig


def split(projected: torch.Tensor, config: MheConfig, is_shared: bool = False) -> torch.Tensor:
    """What a projection made, [B, S, K * d], as a vector of each of its heads, [B, S, K, d]; ``K`` is ``n``, or 1 of
    one that all heads share. What may shrink is read off the tensor."""
    if not config.width_first:
        return projected.view(*projected.shape[:2], -1, config.head_size)
    heads = 1 if is_shared else config.num_attention_heads
    return projected.view(*projected.shape[:2], -1, heads).transpose(2, 3)


def joined(context: torch.Tensor, config: MheConfig) -> torch.Tensor:
    """What heads read, [B, S, n, d], as the output projection takes it, [B, S, n * d]."""
    return (context.transpose(2, 3) if config.width_first else context).flatten(2)


def by_head(table: torch.Tensor, config: MheConfig) -> torch.Tensor:
    """A table of head embeddings as [n, d], or such numbers as a table."""
    return table.T if config.width_first else table


def rows_of(by_heads: torch.Tensor, config: MheConfig) -> torch.Tensor:
    """[n, d, ...] as the rows of a projection, [n * d, ...]."""
    return (by_heads.transpose(0, 1) if config.width_first else by_heads).flatten(0, 1)
