"""An encoder with conditional adapters as the compiler compares and traces it, and on tokens that an engine chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ....errors import ParityError
from ...architecture import JudgedRoutes, Replay
from ...modules.layers import Answering, on_same_weights
from ...modules.top_tokens import indices_problem, ranking_gap, repeated_token, taken, traced_highest
from ...onnx_translations import top_places
from .config import ROUTES
from .model import CodaEncoder, Layer
from .routing import Selection, TracedRows


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
    """A copy of ``module`` on the same weights as a graph has it, in ``variants`` (``variant_ops``)."""
    model: CodaEncoder = on_same_weights(module.model)
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


# A gate below this adds nothing that float32 could hold beside a state.
_VANISHED = 1e-6


def replay(
    model: CodaEncoder,
    inputs: Sequence[torch.Tensor | None],
    given: Mapping[str, torch.Tensor],
    behind: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = lambda answer: (answer,),
) -> Replay:
    """A pass of ``model`` on the tokens ``given`` [B, k] by name, each judged by the scores behind the same tokens.

    ``inputs`` are the model's; its outputs are what ``behind`` makes of its answer. Raises ParityError for tokens that
    no router of these shapes can select.
    """
    names = {layer: f"{ROUTES}{layer}" for layer in model.config.conditional}
    if given.keys() != set(names.values()):
        raise ParityError(f"routes {', '.join(sorted(given)) or 'none'}: expected {', '.join(names.values())}")
    image = model.config.image
    assert inputs[0] is not None
    rows, tokens = inputs[0].shape[0], inputs[0].shape[1] if image is None else image.tokens
    counts = model.counts(tokens)
    for layer, name in names.items():
        shape = (rows, counts.get(layer, 0))
        if problem := indices_problem(given[name], shape, 0, tokens - 1) or repeated_token(given[name], _row):
            raise ParityError(f"{name}: {problem}")
    output, found = model.routed(*inputs, given={layer: given[name] for layer, name in names.items()})
    return Replay(behind(output), {name: _judged(layer, found[layer]) for layer, name in names.items()})


def _judged(layer: int, selection: Selection) -> JudgedRoutes:
    gap = ranking_gap(selection.ranked, selection.chosen, _row)
    tokens = selection.ranked.shape[1]
    took, own = (taken(chosen, tokens) for chosen in (selection.chosen, selection.own))  # [B, n]
    shares = {
        "mean_gate": float(selection.gates.mean()),
        "gates_vanished": float((selection.gates < _VANISHED).double().mean()),
    }
    made, differing = selection.chosen.numel(), int((took & ~own).sum())
    return JudgedRoutes(gap.value, f"layer {layer}, {gap.where}", made, differing, shares)


def _row(index: tuple[int, ...]) -> str:
    (row,) = index
    return f"row {row}"
