"""What an engine must equal: a pass of the PyTorch submodel, with the engine's decisions where it makes any.

Where a model routes tokens to experts, a score that differs in its last bit may send a token elsewhere, and what
follows differs by far more than rounding though nothing is wrong. So the PyTorch submodel takes the engine's decisions
in place of its own, and judges each by the scores that it has itself at that place, behind the same decisions.

Rule: no decision is worse than PyTorch's own by more than ``atol``, in units of the score that decides, which is what
rounding may move such a score by; and given the engine's decisions, its outputs keep the rule of parity.py. A wrong
route breaks the first part, an expert that computes something else or is added wrongly the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import ParityError
from ..exporters.family import Family, Judged
from ..runtime.manifest import DecisionEntry, ParityDecision
from .cases import Case
from .parity import Arrays, Tolerance


@dataclass(frozen=True)
class BrokenDecision:
    """A decision that is further from PyTorch's own than the rule allows; ``where`` says which and by how much."""

    failed_case: str
    where: str

    def describe(self) -> str:
        return self.where


@dataclass(frozen=True)
class Replayed:
    """A PyTorch module on every case with an engine's decisions: its outputs by name, and what it says of them."""

    outputs: Sequence[Arrays]
    decisions: tuple[ParityDecision, ...] | None = None
    broken: BrokenDecision | None = None


def rule_of(limit: Tolerance, decisions: Sequence[DecisionEntry] | None) -> str:
    """The rule of the gate in words."""
    if not decisions:
        return limit.rule
    return f"decisions within {limit.atol:.3g} of PyTorch's own by score; with them given, {limit.rule}"


def replayed(
    family: Family,
    module: torch.nn.Module,
    names: Sequence[str],
    cases: Sequence[Case],
    decisions: Sequence[DecisionEntry] | None,
    found: Sequence[Arrays],
    limit: Tolerance,
) -> Replayed:
    """``module`` on ``cases`` with the ``decisions`` that an engine took (``found``, by name and case).

    Where engines take none, the module alone. ``names`` are those of its outputs.

    Raises ParityError for a decision that no model of these shapes can make.
    """
    if not decisions:
        return Replayed(reference_outputs(module, names, cases))
    outputs: list[Arrays] = []
    judged: dict[str, list[Judged]] = {entry.name: [] for entry in decisions}
    broken: BrokenDecision | None = None
    for case, arrays in zip(cases, found, strict=True):
        try:
            with torch.no_grad():
                replay = family.replay(module, _inputs(case.feeds), _given(decisions, arrays))
        except ParityError as failure:
            raise ParityError(f"case {case.name}: {failure}") from failure
        outputs.append({name: tensor.numpy() for name, tensor in zip(names, replay.outputs, strict=True)})
        for name, verdicts in judged.items():
            verdicts.append(replay.decisions[name])
            broken = broken or _broken(name, case.name, verdicts[-1], limit)
    return Replayed(outputs, tuple(_total(name, verdicts) for name, verdicts in judged.items()), broken)


def pass_of(
    family: Family, module: torch.nn.Module, decisions: Sequence[DecisionEntry] | None, found: Arrays
) -> Callable[[Arrays], object]:
    """A pass of ``module`` on inputs by name, with the ``decisions`` that an engine took (``found``, by name)."""

    def run(feeds: Arrays) -> object:
        with torch.no_grad():
            if decisions:
                return family.replay(module, _inputs(feeds), _given(decisions, found))
            return module(*_inputs(feeds))

    return run


def reference_outputs(module: torch.nn.Module, names: Sequence[str], cases: Sequence[Case]) -> list[Arrays]:
    """Outputs of a PyTorch module by itself, one mapping per case."""
    with torch.no_grad():
        results = [module(*_inputs(case.feeds)) for case in cases]
    return [{name: tensor.numpy() for name, tensor in zip(names, result, strict=True)} for result in results]


def _given(decisions: Sequence[DecisionEntry], found: Arrays) -> dict[str, torch.Tensor]:
    """What an engine decided, among everything that it returned."""
    return {entry.name: torch.from_numpy(found[entry.name]) for entry in decisions}


def _inputs(feeds: Arrays) -> list[torch.Tensor]:
    return [torch.from_numpy(np.asarray(array)) for array in feeds.values()]


def _broken(name: str, case: str, verdict: Judged, limit: Tolerance) -> BrokenDecision | None:
    if verdict.margin <= limit.atol:  # written so that a margin that is no number breaks the rule
        return None
    worse = f"worse than PyTorch's own by {verdict.margin:.3g}, allowed {limit.atol:.3g}"
    return BrokenDecision(case, f"decision {name}, case {case}: {verdict.where}; {worse}")


def _total(name: str, verdicts: Sequence[Judged]) -> ParityDecision:
    shares: Mapping[str, float] = {
        share: float(np.mean([verdict.shares[share] for verdict in verdicts])) for share in verdicts[0].shares
    }
    return ParityDecision(
        name,
        sum(verdict.made for verdict in verdicts),
        sum(verdict.differing for verdict in verdicts),
        max(verdict.margin for verdict in verdicts),
        shares,
    )
