"""An encoder with conditional adapters as the compiler compares and traces it."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from ....modules.top_tokens import traced_highest
from ....tracing.top_rows import top_places
from .encoder import CodaEncoder
from .layer import Layer
from .rows import TracedRows


class Answering(torch.nn.Module):
    """``model`` as families hand it over: inputs by position, a tuple of outputs."""

    def __init__(self, model: CodaEncoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.model(*inputs),)


class Lowered(torch.nn.Module):
    """``model`` as ``Answering`` has it, whose output is followed by the tokens that every conditional layer chose."""

    def __init__(self, model: CodaEncoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, found = self.model.routed(*inputs)
        if not self.model.config.has_scores:
            return (output,)
        return (output, *(found[layer].chosen for layer in sorted(found)))


def lower(module: Answering, variants: Mapping[str, str]) -> Lowered:
    """A copy of ``module`` on the same weights as a graph has it, in ``variants`` (variant_ops.py)."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    model = copy.deepcopy(module.model, shared)
    take_variants(model, variants)
    return Lowered(model)


def take_variants(model: CodaEncoder, variants: Mapping[str, str]) -> None:
    """Makes ``model`` choose, read and add tokens as a graph does, in ``variants``."""
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if layer.router is not None:
            layer.router.choose = _traced_choice
            if variants:
                layer.rows = TracedRows(variants)


def _traced_choice(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the highest, of a row of one length or of any."""
    return top_places(scores, count) if isinstance(count, torch.SymInt) else traced_highest(scores, count)
