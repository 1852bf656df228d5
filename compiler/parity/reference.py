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

Models ask for float32 by name here and there (norms, softmax, rotary angles). What depends on a weight stays in float64
there; what depends on none, such as a table of rotary angles or a mixing matrix, is as much given as a weight is, and
keeps the float32 numbers that the model, and so an engine, computes with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...bundle.entries.engine_entry import ParityRouting, RoutingEntry
from ...bundle.entries.tensor_spec import TensorSpec
from ...errors import ParityError
from ...exporters.architecture import JudgedRoutes, Routing
from ...runtime.inputs.arrays import Arrays
from .cases import Case
from .compare import Rounding, Roundings, Tolerance, rounding, with_rounding
from .judge import BrokenRoute, Replayed

# Passes with moved weights at most, where one does not explain what an engine is off by: of thousands of positions,
# as a long sequence has, some are lucky in every one of a few.
_NUDGED_PASSES = 31
# Most that PyTorch's float32 may move the score gap of a route by: scores that decide are probabilities.
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


def widened(module: torch.nn.Module) -> torch.nn.Module:
    """A copy with float64 parameters, twice the bytes of the weights, on the same buffers. Run it ``in_float64``."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in module.buffers()}
    for parameter in module.parameters():
        memo[id(parameter)] = torch.nn.Parameter(parameter.data.double(), requires_grad=False)
    return copy.deepcopy(module, memo)


def nudged(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy of a float32 ``module`` on the same buffers: an eighth of its weights is moved by one unit in the last
    place, in the mean what rounding each of them once does."""
    generator = np.random.default_rng(seed)
    memo: dict[int, object] = {id(buffer): buffer for buffer in module.buffers()}
    for parameter in module.parameters():
        bits = parameter.data.contiguous().numpy().view(np.int32)
        chance = np.frombuffer(generator.bytes(bits.size), np.uint8).reshape(bits.shape)
        # A float's bits count up from zero; half of a byte's values in 32 go up, half down.
        steps = (chance < 16).astype(np.int8) - ((chance >= 16) & (chance < 32))
        moved = torch.from_numpy((bits + steps * (bits << 1 != 0)).view(np.float32))  # no sign of a zero
        memo[id(parameter)] = torch.nn.Parameter(moved, requires_grad=False)
    return copy.deepcopy(module, memo)


def float64_inputs(feeds: Mapping[str, np.ndarray]) -> tuple[torch.Tensor, ...]:
    """A ``widened`` module's inputs, by position."""
    given = (torch.from_numpy(np.asarray(array)) for array in feeds.values())
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in given)


@contextmanager
def in_float64() -> Iterator[None]:
    """Where a ``widened`` module runs: nothing that depends on a weight is narrowed to float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of plain numbers, such as the lowest finite one of the weights' type
    try:
        with _Wide(), torch.no_grad():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


class _Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation that takes a float64 tensor takes its float32 ones as float64, and returns no float32."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if not func._schema.is_mutable and (_has_wide(args) or _has_wide(named.values())):
            args = tuple(map(_wide, args))
            named = {name: _wide(value) for name, value in named.items()}
            if named.get("dtype") is torch.float32:
                named["dtype"] = torch.float64
        return func(*args, **named)


# An operation takes tensors and lists of them. Every one of a pass comes here: torch's walk through any structure
# would take longer than the operations of a small model.
def _has_wide(values: Iterable[Any]) -> bool:
    return any(
        value.dtype is torch.float64
        if isinstance(value, torch.Tensor)
        else isinstance(value, list | tuple) and _has_wide(value)
        for value in values
    )


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype is torch.float32 else value
    return [_wide(each) for each in value] if isinstance(value, list | tuple) else value
