"""The tensors of ``folded_shapes.py``, made of a sublayer's parameters; sums and products in float64, rounded once.

Each element of them is made of one number of one head, and of what all share at its place, so the first heads of a
fold, or the first numbers of all heads, are the fold of those, to the bit.
"""

from __future__ import annotations

import torch

from .attention import Attention
from .layout import by_head, rows_of


def fold(attention: Attention, name: str) -> torch.Tensor:
    """The tensor called ``name`` below ``attention``, in the dtype of its parameters."""
    form, _, part = name.partition(".")
    made = _folded(attention, part) if form == "folded" else _expanded(attention, *part.split("."))
    return made.to(attention.output.weight.dtype).contiguous()


def _folded(attention: Attention, part: str) -> torch.Tensor:
    config = attention.config
    match part:
        case "query":  # section 6.3
            return by_head(_query_factors(attention), config)
        case "key":
            return _weight(attention, "key") * config.scale
        case "output":  # section 6.5
            return attention.output.weight.detach().double() * rows_of(_factors(attention, "value"), config)
    kind = part.rpartition(".")[2]
    if config.attention == "mhe_mul":
        return _scaled_rows(attention, "query", kind, _query_factors(attention))
    return _expanded(attention, "query", kind)


def _expanded(attention: Attention, role: str, kind: str) -> torch.Tensor:
    """Sections 6.1 and 6.2: the projection of ``role`` for each head, [n * d, H], or its bias [n * d]."""
    if attention.config.attention == "mhe_mul":
        return _scaled_rows(attention, role, kind, _factors(attention, role))
    added = attention.embeddings(role).detach().double()  # [n, d]
    if kind == "weight":
        return rows_of(_weight(attention, role).expand(len(added), -1, -1), attention.config)
    bias: torch.Tensor | None = getattr(attention, role).bias
    return rows_of(added if bias is None else added + bias.detach().double(), attention.config)


def _scaled_rows(attention: Attention, role: str, kind: str, factors: torch.Tensor) -> torch.Tensor:
    """The projection's weight [n * d, H] or bias [n * d] with each head's ``factors`` [n, d] on its rows."""
    if kind == "bias":
        bias: torch.Tensor = getattr(attention, role).bias
        return rows_of(bias.detach().double() * factors, attention.config)
    return rows_of(_weight(attention, role) * factors[..., None], attention.config)


def _weight(attention: Attention, role: str) -> torch.Tensor:
    weight: torch.Tensor = getattr(attention, role).weight
    return weight.detach().double()


def _query_factors(attention: Attention) -> torch.Tensor:
    """``c_i`` of section 6.3, [n, d]: both factors of a head, and the softmax scale."""
    return _factors(attention, "query") * _factors(attention, "key") * attention.config.scale


def _factors(attention: Attention, role: str) -> torch.Tensor:
    return attention.factors(role).detach().double()
