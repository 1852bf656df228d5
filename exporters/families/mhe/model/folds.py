"""The tensors of ``folded_shapes.py``, made of a sublayer's parameters; sums and products in float64, rounded once.

Each element of them is made of one head's own numbers and what all share, so the first heads of a fold are the fold of
the first heads, to the bit.
"""

from __future__ import annotations

import torch

from .attention import Attention


def fold(attention: Attention, name: str) -> torch.Tensor:
    """The tensor called ``name`` below ``attention``, in the dtype of its parameters."""
    form, _, part = name.partition(".")
    made = _folded(attention, part) if form == "folded" else _expanded(attention, *part.split("."))
    return made.to(attention.output.weight.dtype).contiguous()


def _folded(attention: Attention, part: str) -> torch.Tensor:
    config = attention.config
    match part:
        case "query":  # section 6.3
            return _factors(attention, "query") * _factors(attention, "key") * config.scale
        case "key":
            return _weight(attention, "key") * config.scale
        case "output":  # section 6.5
            return attention.output.weight.detach().double() * _factors(attention, "value").flatten()
    kind = part.rpartition(".")[2]
    if config.attention == "mhe_mul":
        return _scaled_rows(attention, "query", kind, _folded(attention, "query"))
    return _expanded(attention, "query", kind)


def _expanded(attention: Attention, role: str, kind: str) -> torch.Tensor:
    """Sections 6.1 and 6.2: the projection of ``role`` for each head, [n * d, H], or its bias [n * d]."""
    if attention.config.attention == "mhe_mul":
        return _scaled_rows(attention, role, kind, _factors(attention, role))
    added: torch.Tensor = attention.embedding[role].detach().double()  # [n, d]
    if kind == "weight":
        return _weight(attention, role).repeat(added.shape[0], 1)
    bias: torch.Tensor | None = getattr(attention, role).bias
    return (added if bias is None else added + bias.detach().double()).flatten()


def _scaled_rows(attention: Attention, role: str, kind: str, factors: torch.Tensor) -> torch.Tensor:
    """The projection's weight [n * d, H] or bias [n * d] with each head's ``factors`` [n, d] on its rows."""
    if kind == "bias":
        bias: torch.Tensor = getattr(attention, role).bias
        return (bias.detach().double() * factors).flatten()
    return (_weight(attention, role) * factors[..., None]).flatten(0, 1)


def _weight(attention: Attention, role: str) -> torch.Tensor:
    weight: torch.Tensor = getattr(attention, role).weight
    return weight.detach().double()


def _factors(attention: Attention, role: str) -> torch.Tensor:
    return attention.factors(role).detach().double()
