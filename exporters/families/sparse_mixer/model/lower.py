"""A Sparse Mixer as the compiler traces it: in static shapes, in the chosen variants, with its routes as outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from .answering import Answering
from .encoder import SparseMixer
from .folded_mixing import FoldedMixing, HalfTables
from .moe import MoE
from .static_moe import StaticMoE


class Lowered(torch.nn.Module):
    """``model`` as ``Answering`` has it, whose outputs are followed by the routes of every layer of experts."""

    def __init__(self, model: SparseMixer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        outputs, routes = self.model.routed(input_ids, token_type_ids)
        return (*outputs, *(routes[layer].chosen for layer in sorted(routes)))


def lower(module: Answering, variants: Mapping[str, str]) -> Lowered:
    """A copy of ``module`` on the same weights, in ``variants`` (see variant_ops.py for which there are)."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    model = copy.deepcopy(module.model, shared)
    for layer in model.layers:
        if isinstance(layer.moe, MoE):
            layer.moe = StaticMoE(layer.moe, variants)
    if variants.get("mixing") == "folded":
        along = [HalfTables(size) for size in (model.sequence, model.config.hidden_size)]
        for layer in model.layers:
            if layer.mixing is not None:
                layer.mixing = FoldedMixing(model.config, *along)
    return Lowered(model)
