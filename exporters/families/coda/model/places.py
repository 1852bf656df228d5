"""What a layer must know of the places of tokens, for all of them and for those that it selects.

Shapes: ``B`` rows of ``n`` tokens, ``A`` heads, ``k`` selected tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional

from ....modules.additive_mask import additive_mask
from ....modules.positions import Positions, rotary
from ....modules.relative_distance import RELATIVE_BUCKETS, RELATIVE_REACH, distance_bucket


class RelativeBias(torch.nn.Module):
    """``weight`` [32, A]: what each head adds to a score, by the bucket of the distance, half of them for each side."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(RELATIVE_BUCKETS, heads))

    def forward(self, length: int) -> torch.Tensor:
        """[A, n, n] of sequences of ``length``: queries along the second dimension, keys along the last."""
        place = torch.arange(length, device=self.weight.device)[None]
        return self.between(place, place, length)[0]

    def between(self, asking: torch.Tensor, read: torch.Tensor, length: int) -> torch.Tensor:
        """[B, A, q, m] of the tokens ``asking`` [B, q] for the tokens ``read`` [B, m], in sequences of ``length``."""
        # All steps first, of which there are few: then a pair is one difference and one row.
        steps = torch.arange(1 - length, length, device=self.weight.device)
        steps = steps.clamp(-RELATIVE_REACH, RELATIVE_REACH) + RELATIVE_REACH  # all farther ones are alike
        buckets = torch.tensor(_BUCKETS, device=self.weight.device)[steps]
        by_step = functional.embedding(buckets, self.weight)  # [2n - 1, A]
        pairs = (read + (length - 1))[:, None] - asking[..., None]  # [B, q, m]
        return functional.embedding(pairs, by_step).permute(0, 3, 1, 2)


def relative_bucket(step: int) -> int:
    """The bucket of a key ``step`` tokens behind its query, or before it where that is below 0."""
    half = RELATIVE_BUCKETS // 2
    return distance_bucket(abs(step), half, RELATIVE_REACH) + (half if step > 0 else 0)


# Of every step that the table tells apart.
_BUCKETS = tuple(relative_bucket(step) for step in range(-RELATIVE_REACH, RELATIVE_REACH + 1))


@dataclass(frozen=True)
class Places:
    """``row`` [n] are all places. ``is_token`` [B, n] says what is no padding, ``mask`` [B, 1, 1, n] the same, added to
    scores: both None where rows have no padding. ``relative`` and ``head_size`` are there where positions are relative,
    or rotary."""

    row: torch.Tensor
    is_token: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    relative: RelativeBias | None = None
    head_size: int | None = None

    @classmethod
    def of(
        cls,
        attention_mask: torch.Tensor | None,
        like: torch.Tensor,
        relative: RelativeBias | None,
        head_size: int | None,
    ) -> Places:
        """Those of ``attention_mask`` [B, n], 1 where a token counts, for states ``like`` [B, n, d]."""
        row = torch.arange(like.shape[1], device=like.device)
        if attention_mask is None:
            return cls(row, relative=relative, head_size=head_size)
        is_token = attention_mask > 0
        return cls(row, is_token, additive_mask(is_token, like)[:, None, None], relative, head_size)

    def added(self, asking: torch.Tensor | None = None, read: torch.Tensor | None = None) -> torch.Tensor | None:
        """What is added to scores: those of the tokens ``asking`` [B, q] for the tokens ``read`` [B, m], each all by
        default. Broadcasts to [B, A, q, m]; None where there is neither padding nor a bias."""
        mask = self.mask
        if mask is not None and read is not None:
            mask = mask.gather(-1, read[:, None, None])
        if self.relative is None:
            return mask
        length = self.row.shape[0]
        if asking is None:
            bias = self.bias[None]  # [1, A, n, n]
        elif read is None:
            heads = torch.arange(self.bias.shape[0], device=asking.device)
            rows = asking[:, None] + length * heads[:, None]  # [B, A, q]
            bias = functional.embedding(rows, self.bias.flatten(0, 1))  # [B, A, q, n]
        else:
            bias = self.relative.between(asking, read, length)
        return bias if mask is None else bias + mask

    @cached_property
    def bias(self) -> torch.Tensor:
        """[A, n, n], of all pairs: made once for all layers that need it."""
        assert self.relative is not None
        table: torch.Tensor = self.relative(self.row.shape[0])
        return table

    def turn(self, tokens: torch.Tensor | None = None) -> Positions | None:
        """What turns the queries or keys of ``tokens`` [B, k], by default all, by their own positions."""
        if self.head_size is None:
            return None
        if tokens is None:
            return rotary(self.row, self.head_size)
        return rotary(tokens[:, None], self.head_size)
