"""A model whose tensors have heads in front as one that has their width there, or the other way around."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..architecture.config import Layout, MheConfig
from ..architecture.places import places_of
from .lower import copied


def turned(model: Any) -> Any:  # MheEncoder, MheDecoder or MheEncoderDecoder
    """A copy of ``model`` that is the same function in the other ``layout``: what may shrink is then the width of heads
    in place of their number, or their number again. That way it was not trained nested, and its configuration, the
    copy's ``config``, says so."""
    before: MheConfig = model.config
    layout: Layout = "heads_first" if before.width_first else "width_first"
    config, made = replace(before, layout=layout, nested=False, granularities=None), copied(model)
    for module in made.modules():
        if getattr(module, "config", None) is not None:
            module.config = config
    for place in places_of(before):
        attention = made.get_submodule(place.at)
        for name, parameter in list(attention.named_parameters()):
            part, _, kind = name.rpartition(".")
            if name == "output.weight":
                found = _turned_rows(parameter.T.contiguous(), before).T
            elif part in before.own_projections:
                found = _turned_rows(parameter, before)
            elif part in ("embedding", "factor"):
                found = parameter.T
            else:
                continue
            found = found.detach().clone(memory_format=torch.contiguous_format)
            setattr(attention.get_submodule(part), kind, torch.nn.Parameter(found, parameter.requires_grad))
    return made


def _turned_rows(rows: torch.Tensor, config: MheConfig) -> torch.Tensor:
    """The numbers of all heads, ``[n * d, ...]``, number by number where they are head by head, or back."""
    return rows.view(*config.table_shape, *rows.shape[1:]).transpose(0, 1).flatten(0, 1)
