"""Reference of an engine: a pass of the PyTorch submodel in float64, with the engine's routes where it has any.

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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from ...bundle.entries.engine_entry import ParityRouting, RoutingEntry
from ...bundle.entries.tensor_spec import TensorSpec
from ...errors import ParityError
from ...exporters.architecture import JudgedRoutes, Replay, Routing
from ...progress import tell
from ...runtime.inputs.arrays import Arrays
from .cases import Case, judged_places
from .compare import Rounding, Roundings, Tolerance, rounding, with_rounding
from .judge import BrokenRoute, Replayed
from .reading import in_float64, inputs_of, nudged

# Passes with moved weights at most, where one does not explain what an engine is off by: of thousands of positions,
# as a long sequence has, some are lucky in every one of a few.
_NUDGED_PASSES = 63
# Most that PyTorch's float32 may move the score gap of a route by: scores that decide are probabilities.
_MAX_GAP_ROUNDING = 0.01


@dataclass(frozen=True, eq=False)
class Reference:
    """A PyTorch ``module`` (float32) whose outputs are ``specs``; ``routing`` is that of its model, None where it
    decides nothing on the way. It computes in float64 within ``in_float64(reference.module)``.
    """

    routing: Routing | None
    module: torch.nn.Module
    specs: Sequence[TensorSpec]

    def viewed(self, view: Callable[[torch.nn.Module], torch.nn.Module], specs: Sequence[TensorSpec]) -> Reference:
        """The reference of another module on the same weights, such as one that returns every exit's answer."""
        return Reference(self.routing, view(self.module), specs)

    def run(
        self, feeds: Arrays, routes: Sequence[RoutingEntry] | None = None, found: Arrays | None = None
    ) -> tuple[tuple[torch.Tensor, ...], Mapping[str, JudgedRoutes]]:
        """Outputs of a pass, and what it says of the ``routes`` that an engine took (``found``, by name)."""
        inputs = inputs_of(feeds)
        with torch.no_grad():
            if not routes or self.routing is None or found is None:
                replay = Replay(tuple(self.module(*inputs)), {})
            else:
                given = {entry.name: torch.from_numpy(found[entry.name]) for entry in routes}
                replay = self.routing.replay(self.module, inputs, given)
        return replay.outputs, replay.routes

    def run_judged(
        self, case: Case, routes: Sequence[RoutingEntry] | None, found: Arrays | None
    ) -> tuple[dict[str, np.ndarray], Mapping[str, JudgedRoutes]]:
        """Outputs of ``run``, by name, of the rows and positions of ``case`` that are compared."""
        with _first_output_where_judged(self, case) if case.picks else nullcontext():
            tensors, routed = self.run(case.feeds, routes, found)
        named = {spec.name: tensor.numpy() for spec, tensor in zip(self.specs, tensors, strict=True)}
        return case.read(named, self.specs), routed


def in_torch(reference: Reference, cases: Sequence[Case]) -> list[Arrays]:
    """Outputs of ``reference`` by name, in float64, of what is compared of ``cases``; routes are its own."""
    with in_float64(reference.module):
        return [reference.run_judged(case, None, None)[0] for case in cases]


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
    in_float32: Collection[str] = (),
) -> Replayed:
    """``reference`` on ``cases`` with the ``routes`` that an engine took (``found``, by name and case), whose
    score gaps ``atol`` judges; by itself where engines take none.

    Later passes are made of what ``remade`` returns, so that what is returned holds no module. The cases ``in_float32``
    are passed in float64 only where that is asked of what is returned; no engine takes routes there.

    Raises ParityError for routes that no model of these shapes can take.
    """
    names = [entry.name for entry in routes or ()]
    taken = found if routes else [{} for _ in cases]
    outputs: list[Arrays] = [{} for _ in cases]
    verdicts: list[Mapping[str, JudgedRoutes]] = [{} for _ in cases]
    rounded: dict[
        int, Arrays
    ] = {}  # PyTorch's float32 where float64 is not known yet, and what it is off by where it is
    known: dict[int, Roundings] = {}
    done, every = 0, {case.name for case in cases}
    tokens = sum(case.tokens for case in cases if case.name not in in_float32) + sum(case.tokens for case in cases)

    def passes(
        reference: Reference, reading: AbstractContextManager[None], only: Collection[str]
    ) -> Iterator[tuple[int, dict[str, np.ndarray], Mapping[str, JudgedRoutes]]]:
        nonlocal done
        with reading:
            for number, (case, arrays) in enumerate(zip(cases, taken, strict=True)):
                if case.name in only:
                    tell(done, tokens)
                    done += case.tokens
                    try:
                        yield number, *reference.run_judged(case, routes, arrays)
                    except ParityError as failure:
                        raise ParityError(f"case {case.name}: {failure}") from failure

    def in_wide(reference: Reference, only: Collection[str]) -> None:
        for number, answers, judged in passes(reference, in_float64(reference.module), only):
            outputs[number], verdicts[number] = answers, judged

    def with_pass(
        reference: Reference,
        reading: AbstractContextManager[None],
        so_far: Sequence[Roundings],
        only: Collection[str],
        left: Sequence[int],
    ) -> Replayed:
        worst = list(so_far)
        for number, answers, judged in passes(reference, reading, only):
            if not outputs[number]:
                rounded[number] = answers
                continue
            own = {name: rounding(outputs[number][name], array) for name, array in answers.items()}
            own |= {name: _of_gaps(verdicts[number][name], verdict) for name, verdict in judged.items()}
            worst[number] = {name: one.worst(worst[number].get(name, Rounding())) for name, one in own.items()}
        return judged_by(worst, left)

    def judged_by(worst: Sequence[Roundings], left: Sequence[int]) -> Replayed:
        broken = [
            _broken(name, case.name, verdict[name], atol, own[name])
            for case, verdict, own in zip(cases, verdicts, worst, strict=True)
            for name in names
        ]
        wrong = [one for one in broken if one is not None]
        return Replayed(
            [exact or rounded[number] for number, exact in enumerate(outputs)],
            worst,
            tuple(_total(name, [verdict[name] for verdict in verdicts]) for name in names) or None,
            next(iter(wrong), None),
            (lambda more: once_more(worst, more, left)) if left else None,
            frozenset(one.failed_case for one in wrong),
            frozenset(cases[number].name for number in rounded),
            (lambda more: exactly(worst, more, left)) if rounded else None,
        )

    def once_more(so_far: Sequence[Roundings], only: Collection[str], left: Sequence[int]) -> Replayed:
        again = again_of()
        return with_pass(again, nudged(again.module, left[0]), so_far, only, left[1:])

    def exactly(so_far: Sequence[Roundings], only: Collection[str], left: Sequence[int]) -> Replayed:
        in_wide(again_of(), {cases[number].name for number in rounded} & set(only))
        for number in [number for number in rounded if outputs[number]]:
            answers = rounded.pop(number)
            known[number] = {name: rounding(outputs[number][name], array) for name, array in answers.items()}
        return judged_by([own or known.get(number, {}) for number, own in enumerate(so_far)], left)

    again_of = remade or (lambda: reference)
    in_wide(reference, every - set(in_float32))
    return with_pass(reference, nullcontext(), [{} for _ in cases], every, range(_NUDGED_PASSES))


@contextmanager
def _first_output_where_judged(reference: Reference, case: Case) -> Iterator[None]:
    """Within it the linear layer that makes the first output of ``reference``, such as logits of a vocabulary, makes
    it of the positions that are compared alone; where there is no such layer, what it made is dropped behind it."""
    dims, (rows, *tokens) = reference.specs[0].dims, next(iter(case.feeds.values())).shape
    size = dims[2] if dims[:2] == ("batch", "sequence") and len(dims) == 3 else None
    alone = not any(spec.dims[:2] == ("batch", "sequence") for spec in reference.specs[1:])
    places = judged_places(tokens[0], rows * size) if alone and tokens and isinstance(size, int) else ()
    heads = [m for m in reference.module.modules() if isinstance(m, torch.nn.Linear) and len(m.weight) == size]
    if len(heads) != 1 or not tokens or not 0 < len(places) < tokens[0]:
        yield
        return

    def pick(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *others = inputs
        return (hidden[:, list(places)] if tuple(hidden.shape[:-1]) == (rows, tokens[0]) else hidden, *others)

    hook = heads[0].register_forward_pre_hook(pick)
    try:
        yield
    finally:
        hook.remove()


def _of_gaps(exact: JudgedRoutes, float32: JudgedRoutes) -> Rounding:
    """Effect of rounding on a score gap, the same as on scores."""
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
