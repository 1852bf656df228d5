"""What an engine must equal: a pass of the PyTorch submodel in float64, with the engine's routes where it has any.

Where a model routes tokens to experts, a score that differs in its last bit may send a token elsewhere, and what
follows differs by far more than rounding though nothing is wrong. So the PyTorch submodel takes the engine's routes in
place of its own, and judges each by the scores that it has itself at that place, behind the same routes.

Rule: no route is worse than PyTorch's own by a score gap of more than ``atol``, which is what rounding may move such a
score by; and given the engine's routes, its outputs keep the rule of compare.py. A wrong route breaks the first part,
an expert that computes something else or is added wrongly the second. Where PyTorch's own float32
moves such a score by more than a hundredth, the rule would prove nothing, and the compile stops.

Beside it stands what PyTorch's own float32 is off by, which widens the rule where a model amplifies rounding. One pass
may be lucky: where an engine fails by it, more are made, of modules with weights moved by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property

import numpy as np
import torch

from ....bundle.entries.engine_entry import ParityRouting, RoutingEntry
from ....bundle.entries.tensor_spec import TensorSpec
from ....errors import ParityError
from ....exporters.architecture import JudgedRoutes, Routing
from ....runtime.inputs.arrays import Arrays
from .cases import Case
from .compare import Tolerance
from .float64 import float64_inputs, in_float64, nudged, widened
from .replayed import BrokenRoute, Replayed
from .rounding import Rounding, Roundings, rounding, with_rounding

# Passes with moved weights at most, where one does not explain what an engine is off by: of thousands of positions,
# as a long sequence has, some are lucky in every one of a few.
_NUDGED_PASSES = 31
# What PyTorch's float32 may move the score gap of a route by at most: scores that decide are probabilities.
_MAX_GAP_ROUNDING = 0.01


class Reference:
    """A PyTorch ``module`` (float32) whose outputs are ``specs``, and ``wide``, a float64 copy made when first used.

    ``routing`` is that of its model, None where it decides nothing on the way. ``form`` is what a module is turned into
    before it is compared, in float64 after it was widened.
    """

    def __init__(
        self,
        routing: Routing | None,
        module: torch.nn.Module,
        specs: Sequence[TensorSpec],
        form: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
    ) -> None:
        self.routing, self.specs = routing, tuple(specs)
        self._form = form or (lambda unchanged: unchanged)
        self._narrowed, self.module = module, self._form(module)

    @cached_property
    def wide(self) -> torch.nn.Module:
        return self._form(widened(self._narrowed))

    def viewed(self, view: Callable[[torch.nn.Module], torch.nn.Module], specs: Sequence[TensorSpec]) -> Reference:
        """The reference of another module on the same weights, such as one that returns every exit's answer."""
        other = Reference(self.routing, view(self.module), specs)
        other.__dict__["wide"] = view(self.wide)
        return other

    def run(
        self, module: torch.nn.Module, feeds: Arrays, routes: Sequence[RoutingEntry] | None, found: Arrays
    ) -> tuple[tuple[torch.Tensor, ...], Mapping[str, JudgedRoutes]]:
        """Outputs of ``module``, and what it says of the ``routes`` that an engine took (``found``, by name)."""
        is_wide = module is self.__dict__.get("wide")  # not made for a comparison
        inputs = float64_inputs(feeds) if is_wide else tuple(map(torch.from_numpy, feeds.values()))
        with in_float64() if is_wide else nullcontext(), torch.no_grad():
            if not routes or self.routing is None:
                return tuple(module(*inputs)), {}
            given = {entry.name: torch.from_numpy(found[entry.name]) for entry in routes}
            replay = self.routing.replay(module, inputs, given)
            return replay.outputs, replay.routes

    def bound(
        self, feeds: Arrays, routes: Sequence[RoutingEntry] | None, found: Arrays
    ) -> Callable[[torch.nn.Module], object]:
        """``run`` on these inputs, for a module."""
        return lambda module: self.run(module, feeds, routes, found)


def rule_of(limit: Tolerance, routes: Sequence[RoutingEntry] | None) -> str:
    """The rule of the gate in words."""
    if not routes:
        return limit.rule
    return f"routes within {limit.atol:.3g} of PyTorch's own by score; with them given, {limit.rule}"


def replayed(
    reference: Reference,
    cases: Sequence[Case],
    routes: Sequence[RoutingEntry] | None = None,
    found: Sequence[Arrays] = (),
    atol: float = 0.0,
    remade: Callable[[], Reference] | None = None,
) -> Replayed:
    """``reference`` on ``cases`` with the ``routes`` that an engine took (``found``, by name and case), whose
    score gaps ``atol`` judges; by itself where engines take none.

    Later passes are made of what ``remade`` returns, so that what is returned holds no module.

    Raises ParityError for routes that no model of these shapes can take.
    """
    names = [entry.name for entry in routes or ()]
    taken = found if routes else [{} for _ in cases]
    outputs: list[Arrays] = []
    verdicts: list[Mapping[str, JudgedRoutes]] = []
    for case, arrays in zip(cases, taken, strict=True):
        try:
            tensors, judged = reference.run(reference.wide, case.feeds, routes, arrays)
        except ParityError as failure:
            raise ParityError(f"case {case.name}: {failure}") from failure
        outputs.append(_read(reference, case, tensors))
        verdicts.append(judged)

    def with_pass(
        reference: Reference,
        module: torch.nn.Module,
        so_far: Sequence[Roundings],
        only: Collection[str],
        left: Sequence[int],
    ) -> Replayed:
        worst = list(so_far)
        for number, (case, arrays) in enumerate(zip(cases, taken, strict=True)):
            if case.name not in only:
                continue
            tensors, judged = reference.run(module, case.feeds, routes, arrays)
            own = {name: rounding(outputs[number][name], a) for name, a in _read(reference, case, tensors).items()}
            own |= {name: _of_gaps(verdicts[number][name], verdict) for name, verdict in judged.items()}
            worst[number] = {name: one.worst(worst[number].get(name, Rounding())) for name, one in own.items()}
        broken = [
            _broken(name, case.name, verdict[name], atol, own[name])
            for case, verdict, own in zip(cases, verdicts, worst, strict=True)
            for name in names
        ]
        wrong = [one for one in broken if one is not None]
        return Replayed(
            outputs,
            worst,
            tuple(_total(name, [verdict[name] for verdict in verdicts]) for name in names) or None,
            next(iter(wrong), None),
            (lambda more: once_more(worst, more, left)) if left else None,
            frozenset(one.failed_case for one in wrong),
        )

    def once_more(so_far: Sequence[Roundings], only: Collection[str], left: Sequence[int]) -> Replayed:
        again = again_of()
        return with_pass(again, nudged(again.module, left[0]), so_far, only, left[1:])

    again_of = remade or (lambda: reference)
    every = {case.name for case in cases}
    return with_pass(reference, reference.module, [{} for _ in cases], every, range(_NUDGED_PASSES))


def _read(reference: Reference, case: Case, tensors: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
    named = {spec.name: tensor.numpy() for spec, tensor in zip(reference.specs, tensors, strict=True)}
    return case.read(named, reference.specs)


def _of_gaps(exact: JudgedRoutes, float32: JudgedRoutes) -> Rounding:
    """What rounding moves a score gap by, which is what it moves scores by."""
    off = abs(exact.score_gap - float32.score_gap)
    return Rounding(off, off)


def _broken(name: str, case: str, verdict: JudgedRoutes, atol: float, own: Rounding) -> BrokenRoute | None:
    if np.isfinite(verdict.score_gap) and own.largest > _MAX_GAP_ROUNDING:
        moved = f"PyTorch's own float32 moves the score that decides by {own.largest:.3g}"
        why = f"more than {_MAX_GAP_ROUNDING:g}; this model needs more than float32, and nothing would be proved"
        return BrokenRoute(case, f"{name}, case {case}: {moved}, {why}", unprovable=True)
    allowed = float(with_rounding(np.float64(atol), own.largest))
    if verdict.score_gap <= allowed < np.inf:  # written so that a gap that is no number breaks the rule
        return None
    worse = f"worse than PyTorch's own by {verdict.score_gap:.3g}, allowed {allowed:.3g}"
    return BrokenRoute(case, f"{name}, case {case}: {verdict.where}; {worse}")


def _total(name: str, verdicts: Sequence[JudgedRoutes]) -> ParityRouting:
    shares: Mapping[str, float] = {
        share: float(np.mean([verdict.shares[share] for verdict in verdicts])) for share in verdicts[0].shares
    }
    return ParityRouting(
        name,
        sum(verdict.made for verdict in verdicts),
        sum(verdict.differing for verdict in verdicts),
        max(verdict.score_gap for verdict in verdicts),
        shares,
    )
