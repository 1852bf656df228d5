"""A pass of an encoder with conditional adapters on tokens that something else selected, judged by its own scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from .....errors import ParityError
from ....modules.top_tokens import indices_problem, ranking_gap, repeated_token, taken
from ....routing import JudgedRoutes, Replay
from ..architecture.config import ROUTES
from .encoder import CodaEncoder
from .router import Selection

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
