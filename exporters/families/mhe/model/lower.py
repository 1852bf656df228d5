"""An MHE model as the compiler traces it: its attention in the form that was chosen, on the same parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch

from .answering import Answering
from .folds import fold
from .forms import in_form


def lower(module: Answering, form: str) -> Answering:
    """A copy of ``module`` on the same weights whose attention is in ``form``, one that holds for its model."""
    return Answering(in_one_form(module.model, form))


def in_one_form(model: Any, form: str) -> Any:  # MheEncoder or MheDecoder
    """A copy of ``model`` on the same weights whose attention is in ``form``."""
    lowered = copied(model)
    for layer in lowered.layers:
        layer.attention = in_form(layer.attention, form)
    return lowered


def copied(model: Any) -> Any:  # MheEncoder or MheDecoder
    """A copy of ``model`` on the same weights."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def folded_tensor(module: Answering, name: str) -> torch.Tensor:
    """The tensor ``name`` of ``folded_shapes.py``, such as ``layers.3.attention.folded.query``."""
    at, _, part = name.partition(".attention.")
    return fold(module.model.get_submodule(f"{at}.attention"), part)
