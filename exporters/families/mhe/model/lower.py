"""An MHE model as the compiler traces it: its attention in the forms that were chosen, on the same parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from ..architecture.places import places_of
from .answering import Answering
from .folds import fold
from .forms import in_form


def lower(module: Answering, forms: Mapping[str, str]) -> Answering:
    """A copy of ``module`` on the same weights whose attention has the ``forms``, by its role."""
    return Answering(in_forms(module.model, forms))


def in_forms(model: Any, forms: Mapping[str, str]) -> Any:
    """A copy of a model on the same weights whose attention has the ``forms``, by its role; each holds for it."""
    lowered = copied(model)
    for at, _, role in places_of(model.config):
        layer, _, name = at.rpartition(".")
        setattr(lowered.get_submodule(layer), name, in_form(lowered.get_submodule(at), forms[role]))
    return lowered


def copied(model: Any) -> Any:
    """A copy of a model on the same weights."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def folded_tensor(module: Answering, name: str) -> torch.Tensor:
    """The tensor ``name`` of ``folded_shapes.py``, such as ``layers.3.attention.folded.query``."""
    at, _, part = name.partition("attention.")
    return fold(module.model.get_submodule(f"{at}attention"), part)
