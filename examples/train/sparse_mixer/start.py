"""Weights to start from, for a training of minutes: every layer looks at neighbours from the first step on.

BERT's start (normal, 0.02) is meant for hundreds of thousands of steps: at a width of 128 its layers are nearly the
identity for the first thousand, and no token knows of another. Here mixing and attention both begin local.
"""

from __future__ import annotations

import torch

from ....exporters.families.sparse_mixer.model.encoder import DenseFFN, Embeddings, MaskedLmHead, SparseMixer
from ....exporters.families.sparse_mixer.model.mixing import LinearMixing
from ....exporters.families.sparse_mixer.model.moe import Experts
from ....exporters.modules.attention import NestedAttention

_TABLE_SPREAD = 0.02
# What a sublayer adds to its input is smaller than that.
_GAIN = 0.5
# Tokens; a mixing layer begins by looking at about so many to either side.
_REACH = 2.0
# The slowest wave of positions over the fastest, which turns by one radian a token: no longer than a row.
_LONGEST = 30.0
# What queries and keys multiply positions by: a head begins with a token and a little of those beside it.
_FOCUS = 2.0


@torch.no_grad()
def draw_start(model: SparseMixer) -> None:
    """Draws all matrices anew, from torch's own random numbers; biases stay 0 and norms 1."""
    for part in model.modules():
        match part:
            case Embeddings():
                waves = _waves(part.position.weight.shape[0], model.config.head_dim)
                torch.nn.init.zeros_(part.position.weight)[:, : waves.shape[1]] = waves
                torch.nn.init.normal_(part.word.weight, std=_TABLE_SPREAD)[:, : waves.shape[1]] = 0
                torch.nn.init.eye_(part.projection.weight)  # so that attention finds the waves where they are
            case LinearMixing():
                part.sequence.copy_(_local(part.sequence.shape[0]))
                _draw(part.hidden, gain=_GAIN)
            case NestedAttention():
                _look_beside(part)
                _draw(part.value.weight)
                _draw(part.output.weight, gain=_GAIN)
            case DenseFFN():
                _draw(part.up.weight)
                _draw(part.down.weight, gain=_GAIN)
            case Experts():
                for up, down in zip(part.up_weight, part.down_weight, strict=True):
                    _draw(up.T)
                    _draw(down.T)  # a gate of about a half stands for the gain
            case MaskedLmHead():
                _draw(part.transform.weight)


def _draw(weight: torch.Tensor, gain: float = 1.0) -> None:
    """Keeps the size of what ``weight`` [out, in] is applied to, times ``gain``."""
    weight.normal_(std=gain * weight.shape[1] ** -0.5)


def _local(length: int) -> torch.Tensor:
    """A matrix [length, length] that weighs neighbours by a random function of their distance, fading with it."""
    distance = torch.arange(1 - length, length)
    weights = torch.randn(2 * length - 1) * torch.exp(-distance.abs() / _REACH)
    place = torch.arange(length)
    matrix: torch.Tensor = (weights / weights.norm())[place[None] - place[:, None] + length - 1]
    return matrix


def _look_beside(attention: NestedAttention) -> None:
    """Heads that begin with the tokens before, after, two before and so on: queries and keys read positions alone, and
    keys take theirs for one beside it."""
    size = attention.head_dim
    for part in (attention.query, attention.key):
        torch.nn.init.zeros_(part.weight)
    for head in range(attention.query.weight.shape[0] // size):
        rows = slice(head * size, (head + 1) * size)
        offset = (1 + head // 2) * (-1 if head % 2 else 1)
        attention.query.weight[rows, :size] = _FOCUS * torch.eye(size)
        attention.key.weight[rows, :size] = _FOCUS * _shift(size, offset)


def _waves(length: int, width: int) -> torch.Tensor:
    """Sines and cosines of the position [length, width], as large as the other tables."""
    angles = torch.arange(length)[:, None] * _rates(width)
    return _TABLE_SPREAD * 2**0.5 * torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def _shift(width: int, offset: int) -> torch.Tensor:
    """The matrix [width, width] that makes the waves of a position those of the one ``offset`` further."""
    turn, sine = offset * _rates(width), torch.arange(0, width, 2)
    matrix = torch.zeros(width, width)
    matrix[sine, sine] = matrix[sine + 1, sine + 1] = turn.cos()
    matrix[sine, sine + 1], matrix[sine + 1, sine] = turn.sin(), -turn.sin()
    return matrix


def _rates(width: int) -> torch.Tensor:
    """Radians per token of the waves in ``width`` (even) dimensions."""
    rates: torch.Tensor = _LONGEST ** -(torch.arange(width // 2) / (width // 2))
    return rates
