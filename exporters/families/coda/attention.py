"""Attention in which queries may be some of the tokens, and heads may share keys and values.

Shapes: ``B`` rows, ``q`` tokens that ask, ``m`` that are read, ``H`` hidden, ``n`` heads of size ``d``, ``K`` heads of
keys and values; head i reads those of head ``i // (n / K)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional

from ...hugging_face.tensors import RELATIVE_BUCKETS, RELATIVE_REACH, distance_bucket
from ...modules.attention import Positions, additive_mask, rotary
from ...modules.layers import ACTIVATIONS
from .config import CodaConfig


def relative_bucket(step: int) -> int:
    """The bucket of a key ``step`` tokens behind its query, or before it where that is below 0."""
    half = RELATIVE_BUCKETS // 2
    return distance_bucket(abs(step), half, RELATIVE_REACH) + (half if step > 0 else 0)


# Buckets of the steps that the table tells apart.
_BUCKETS = tuple(relative_bucket(step) for step in range(-RELATIVE_REACH, RELATIVE_REACH + 1))


class Adapter(torch.nn.Module):
    """``scale * up(activation(down(x)))``: a small FFN for all tokens, beside a layer or behind it; without an
    activation, what LoRA adds to a matrix: ``up @ down`` has the rank ``adapter_size``."""

    def __init__(self, config: CodaConfig, outputs: int) -> None:
        super().__init__()
        kind, self.scale = config.adapter_activation, config.adapter_scale
        self.activation = None if kind is None else ACTIVATIONS[kind]
        bias = config.adapter_bias and config.adapter != "lora"
        self.down = torch.nn.Linear(config.hidden_size, config.adapter_size, bias)
        self.up = torch.nn.Linear(config.adapter_size, outputs, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., d] to [..., outputs]."""
        inner = self.down(x)
        updated: torch.Tensor = self.up(inner if self.activation is None else self.activation(inner))
        return updated if self.scale == 1 else updated * self.scale


class LowRank(torch.nn.Module):
    """LoRA of attention: terms of ``query`` and ``value``, the two that its paper (arXiv 2106.09685, 4.2) adapts."""

    def __init__(self, config: CodaConfig) -> None:
        super().__init__()
        self.query = Adapter(config, config.inner)
        self.value = Adapter(config, config.key_value_heads * config.head_size)


def make_adapter(config: CodaConfig) -> Adapter | LowRank:
    """The adapter of one layer."""
    return LowRank(config) if config.adapter == "lora" else Adapter(config, config.hidden_size)


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
        """Addend of scores: those of the tokens ``asking`` [B, q] for the tokens ``read`` [B, m], each all by
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
        return self.relative(self.row.shape[0])

    def turn(self, tokens: torch.Tensor | None = None) -> Positions | None:
        """Rotation of the queries or keys of ``tokens`` [B, k], by default all, by their own positions."""
        if self.head_size is None:
            return None
        if tokens is None:
            return rotary(self.row, self.head_size)
        return rotary(tokens[:, None], self.head_size)


class Attention(torch.nn.Module):
    """Projections ``query`` [n * d, H], ``key`` and ``value`` [K * d, H], ``output`` [H, n * d]."""

    def __init__(self, config: CodaConfig) -> None:
        super().__init__()
        self.head_size, self.shared, self.scale = config.head_size, config.key_value_heads, config.scale
        hidden, inner = config.hidden_size, config.inner
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
        rows, heads, length, size = query.shape
        seen, together = key.shape[2], heads // self.shared * length
        # Queries of heads that share keys are one product with them.
        folded = (query * self.scale).reshape(rows, self.shared, together, size)  # [B, K, n / K * q, d]
        scores = (folded @ key.transpose(-1, -2)).view(rows, heads, length, seen)
        scores = scores if added is None else scores + added
        context = scores.softmax(-1).view(rows, self.shared, together, seen) @ value
        merged = context.view(rows, heads, length, size).transpose(1, 2).flatten(2)  # [B, q, n * d]
        return self.output(merged)

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """[B, m, A * d] to [B, A, m, d]."""
        return projected.view(*projected.shape[:2], -1, self.head_size).transpose(1, 2)
