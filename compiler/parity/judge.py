"""One engine's outputs against their reference: what the gate, the exact proof of integers, `verify` and the check of a
plan ask alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...bundle.entries.engine_entry import ParityOutput, ParityRouting
from ...bundle.entries.tensor_spec import TensorSpec
from ...runtime.inputs.arrays import Arrays
from .evidence.cases import Case
from .evidence.compare import Comparison, Tolerance, comparable, compare, counted
from .evidence.replayed import BrokenRoute, Replayed
from .evidence.rounding import Rounding, Roundings


@dataclass(frozen=True)
class JudgedOutputs:
    """What is known of the outputs: their ``specs``, the ones ``computed`` from another, and the input that
    masks positions."""

    specs: Sequence[TensorSpec]
    computed: Collection[str] = ()
    mask: str | None = None

    @cached_property
    def by_position(self) -> frozenset[str]:
        """The outputs ``[batch, sequence, ...]``, which have something at positions that the mask leaves out."""
        return frozenset(spec.name for spec in self.specs if spec.dims[:2] == ("batch", "sequence"))

    def mask_of(self, case: Case) -> np.ndarray | None:
        """``[B, S]`` of the rows of ``case`` that are read, not 0 at the positions that are; None for all."""
        mask = case.feeds.get(self.mask) if self.mask is not None else None
        return mask if mask is None else mask[: case.rows]


@dataclass(frozen=True)
class Verdict:
    """Figures by output and routes; ``broken`` is what breaks the rule, if anything does, and ``broken_cases`` are the
    cases in which something does."""

    outputs: tuple[ParityOutput, ...]
    routes: tuple[ParityRouting, ...] | None
    broken: Comparison | BrokenRoute | None
    broken_cases: frozenset[str] = frozenset()

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
    values are no numbers or of another shape, which no rounding allows.
    """
    got = [case.read(arrays, outputs.specs) for case, arrays in zip(cases, found, strict=True)]
    verdict = _judge(reference, got, cases, outputs, limit)
    while verdict.broken is not None and not verdict.unprovable and reference.again is not None:
        if not _are_comparable(reference.outputs, got):
            break
        reference = reference.again(verdict.broken_cases)
        verdict = _judge(reference, got, cases, outputs, limit)
    return verdict


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
    comparisons = compare(wanted, given, [case.name for case in cases], limit, roundings, outputs.computed)
    broken = reference.broken or next((comparison for comparison in comparisons if not comparison), None)
    broken_cases = reference.broken_cases.union(*(comparison.failed_cases for comparison in comparisons))
    outputs_of = tuple(comparison.output for comparison in comparisons)
    return Verdict(outputs_of, reference.routes, broken, broken_cases)


def _are_comparable(reference: Sequence[Arrays], found: Sequence[Arrays]) -> bool:
    pairs = zip(reference, found, strict=True)
    return all(comparable(wanted[name], given[name]) for wanted, given in pairs for name in wanted)


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
