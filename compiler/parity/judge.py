"""One engine's outputs against their reference, however that was computed: what the gate, the exact proof of integers,
`verify` and the check of a plan ask alike (no torch here: a plan is held against its graph)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...bundle.entries.engine_entry import ParityOutput, ParityRouting
from ...bundle.entries.tensor_spec import TensorSpec
from ...runtime.inputs.arrays import Arrays
from .cases import Case
from .compare import Comparison, Rounding, Roundings, Tolerance, comparable, compare, counted, explainable

_View = Callable[[Sequence[Arrays], Sequence[Roundings]], tuple[Sequence[Arrays], Sequence[Roundings]]]  # by case
_NO_LIMIT = Tolerance(math.inf, 0.0, -math.inf, math.inf)


@dataclass(frozen=True)
class BrokenRoute:
    """A route that is further from PyTorch's own than the rule allows; ``where`` says which and by how much.

    ``unprovable`` where PyTorch's own float32 moves such score gaps by more than any allowance should be.
    """

    failed_case: str
    where: str
    unprovable: bool = False

    def describe(self) -> str:
        return self.where


@dataclass(frozen=True)
class Replayed:
    """The reference on every case with an engine's routes: its outputs by name (float64 of a PyTorch module), what
    PyTorch's own float32 is off by, and what it says of the routes. ``again`` is the same after one more pass of
    float32 on the cases of these names, None after the last. ``broken`` is the first of the routes that are, in
    ``broken_cases``. On the cases ``in_float32`` the outputs are those of PyTorch's float32; ``exact`` is the same with
    the cases of these names in float64."""

    outputs: Sequence[Arrays]
    roundings: Sequence[Roundings]
    routes: tuple[ParityRouting, ...] | None = None
    broken: BrokenRoute | None = None
    again: Callable[[Collection[str]], Replayed] | None = None
    broken_cases: frozenset[str] = frozenset()
    in_float32: frozenset[str] = frozenset()
    exact: Callable[[Collection[str]], Replayed] | None = None

    def after_passes(self, cases: Collection[str], most: int) -> Replayed:
        """With at most so many of the passes of float32 that ``again`` offers on ``cases``."""
        found = self
        for _ in range(most):
            if found.again is None:
                break
            found = found.again(cases)
        return found

    def at(self, cases: Sequence[int]) -> Replayed:
        """On the cases of these numbers alone, where engines take no routes."""
        return self.seen(lambda outputs, roundings: ([outputs[n] for n in cases], [roundings[n] for n in cases]))

    def of(self, names: Mapping[str, str]) -> Replayed:
        """With the outputs ``names`` alone, each under the name that it is mapped to."""
        return self.seen(
            lambda outputs, roundings: (
                [{new: arrays[name] for name, new in names.items()} for arrays in outputs],
                [{new: own[name] for name, new in names.items()} for own in roundings],
            )
        )

    def seen(self, view: _View) -> Replayed:
        """A ``view`` of outputs and roundings: of these, and of what more passes find."""
        again, exact = self.again, self.exact
        outputs, roundings = view(self.outputs, self.roundings)
        return replace(
            self,
            outputs=outputs,
            roundings=roundings,
            again=None if again is None else lambda only: again(only).seen(view),
            exact=None if exact is None else lambda only: exact(only).seen(view),
        )


@dataclass(frozen=True)
class JudgedOutputs:
    """Facts of the outputs: their ``specs``, the ones ``computed`` from another, and the input that masks positions;
    where a decoder answers behind an encoder, positions of what the encoder returns alone."""

    specs: Sequence[TensorSpec]
    computed: Collection[str] = ()
    mask: str | None = None
    has_decoder: bool = False

    @cached_property
    def by_position(self) -> frozenset[str]:
        """The outputs ``[batch, sequence, ...]``, which have something at positions that the mask leaves out."""
        read = [spec.name for spec in self.specs if spec.dims[:2] == ("batch", "sequence")]
        return frozenset(name for name in read if not self.has_decoder or name.startswith("encoder_"))

    def mask_of(self, case: Case) -> np.ndarray | None:
        """``[B, S]`` of the rows of ``case`` that are read, not 0 at the positions that are; None for all."""
        mask = case.feeds.get(self.mask) if self.mask is not None else None
        return mask if mask is None else mask[: case.rows]


@dataclass(frozen=True)
class Verdict:
    """Figures by output and routes; ``broken`` is what breaks the rule, if anything does, and ``broken_cases`` are the
    cases in which something does. Those ``in_float32`` were held against PyTorch's float32."""

    outputs: tuple[ParityOutput, ...]
    routes: tuple[ParityRouting, ...] | None
    broken: Comparison | BrokenRoute | None
    broken_cases: frozenset[str] = frozenset()
    in_float32: frozenset[str] = frozenset()

    @property
    def unprovable(self) -> bool:
        return self.broken is not None and self.broken.unprovable


def judge(
    reference: Replayed,
    found: Sequence[Arrays],
    cases: Sequence[Case],
    outputs: JudgedOutputs,
    limit: Tolerance,
) -> Verdict:
    """The outputs ``found`` of an engine on ``cases``, by the rules of compare.py and reference.py.

    Where they break a limit, PyTorch's own rounding of that case is measured again, before that is believed; not where
    values are no numbers or of another shape, or further off than a rounding that proves something, which no pass
    explains. The first such case is asked alone before all of them are: one that no pass explains is enough.

    A case in PyTorch's float32 alone has half the limits, and where it breaks those it is passed in float64 and judged
    as any other. Half is enough: what is within half of a limit of that float32 is within the limit of the float64, or
    what float32 itself is off by allows the rest.
    """
    got = [case.read(arrays, outputs.specs) for case, arrays in zip(cases, found, strict=True)]

    def judged(reference: Replayed) -> Verdict:
        return _judge(reference, got, cases, outputs, limit)

    def explained(verdict: Verdict, only: frozenset[str]) -> Verdict:
        """After further passes of float32 on the cases in ``only`` that break the rule, until none does."""
        known = reference
        while (asked := verdict.broken_cases & only) and not verdict.unprovable and known.again is not None:
            known = known.again(asked)
            verdict = judged(known)
        return verdict

    verdict = judged(reference)
    if (doubtful := verdict.broken_cases & reference.in_float32) and reference.exact is not None:
        reference = reference.exact(doubtful)
        verdict = judged(reference)
    if not verdict.broken_cases or not _are_comparable(reference.outputs, got):
        return verdict
    if not _are_explainable(reference.outputs, got, cases, outputs, limit, verdict.broken_cases):
        return verdict
    first = next(case.name for case in cases if case.name in verdict.broken_cases)
    alone = explained(verdict, frozenset((first,)))
    return alone if first in alone.broken_cases else explained(verdict, frozenset(case.name for case in cases))


def distance(reference: Replayed, found: Sequence[Arrays], cases: Sequence[Case], outputs: JudgedOutputs) -> Verdict:
    """The figures of the outputs ``found`` of an engine on ``cases``, and of its routes; no rule is asked."""
    got = [case.read(arrays, outputs.specs) for case, arrays in zip(cases, found, strict=True)]
    return replace(_judge(reference, got, cases, outputs, _NO_LIMIT), broken=None, broken_cases=frozenset())


def _judge(
    reference: Replayed,
    got: Sequence[Arrays],
    cases: Sequence[Case],
    outputs: JudgedOutputs,
    limit: Tolerance,
) -> Verdict:
    masks = [outputs.mask_of(case) for case in cases]
    wanted, given = (
        [_counted(arrays, outputs, mask) for arrays, mask in zip(side, masks, strict=True)]
        for side in (reference.outputs, got)
    )
    roundings = [_counted_rounding(own, outputs, mask) for own, mask in zip(reference.roundings, masks, strict=True)]
    in_float32 = reference.in_float32.intersection(case.name for case in cases)
    limits = [limit.half if case.name in in_float32 else limit for case in cases]
    comparisons = compare(wanted, given, [case.name for case in cases], limits, roundings, outputs.computed)
    broken = reference.broken or next((comparison for comparison in comparisons if not comparison), None)
    broken_cases = reference.broken_cases.union(*(comparison.failed_cases for comparison in comparisons))
    outputs_of = tuple(comparison.output for comparison in comparisons)
    return Verdict(outputs_of, reference.routes, broken, broken_cases, in_float32)


def _are_comparable(reference: Sequence[Arrays], found: Sequence[Arrays]) -> bool:
    pairs = zip(reference, found, strict=True)
    return all(comparable(wanted[name], given[name]) for wanted, given in pairs for name in wanted)


def _are_explainable(
    reference: Sequence[Arrays],
    found: Sequence[Arrays],
    cases: Sequence[Case],
    outputs: JudgedOutputs,
    limit: Tolerance,
    only: Collection[str],
) -> bool:
    """Whether passes of float32 could explain all that the cases in ``only`` are off by."""
    for case, *sides in zip(cases, reference, found, strict=True):
        if case.name in only:
            wanted, given = (_counted(arrays, outputs, outputs.mask_of(case)) for arrays in sides)
            if not all(explainable(wanted[n], given[n], limit, n not in outputs.computed) for n in wanted):
                return False
    return True


def _counted(arrays: Arrays, outputs: JudgedOutputs, mask: np.ndarray | None) -> Arrays:
    if mask is None:
        return arrays
    return {name: counted(array, mask) if name in outputs.by_position else array for name, array in arrays.items()}


def _counted_rounding(own: Roundings, outputs: JudgedOutputs, mask: np.ndarray | None) -> Roundings:
    """As the outputs themselves, where a figure is known of each position."""
    if mask is None:
        return own
    return {
        name: Rounding(counted(np.asarray(one.max_abs), mask), counted(np.asarray(one.rms), mask))
        if name in outputs.by_position and np.ndim(one.max_abs) == 2
        else one
        for name, one in own.items()
    }
