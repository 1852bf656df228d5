"""Exits in use: rows leave where PyTorch would let them, whatever batch they are in; the extremes leave first and last.

Engines round, so an entropy within the measured error of its threshold may fall on either side: such near ties are left
out of the comparison and listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..elastic import Bucket, Submodel
from ..exporters.universal import UniversalModel
from ..runtime.bundle import Bundle
from ..runtime.exits.policy import ExitPolicy, closed
from ..runtime.manifest import ExitsEntry, Proof
from ..runtime.model import ElasticModel
from ..runtime.residency import Residency
from ..runtime.threads import threads_or_default
from .build_segments import by_segment
from .cases import Case
from .parity import Arrays, Tolerance

# A receipt's error is that of engines run shared at one shape; packed, and in smaller batches, they round otherwise.
_MARGIN = 2.0
_LISTED = 8


@dataclass(frozen=True)
class _Reference:
    """PyTorch's logits ``[exits, B, C]`` and entropies ``[exits, B]`` of one case."""

    case: Case
    logits: np.ndarray
    entropy: np.ndarray


def prove_exits(
    universal: UniversalModel,
    bundle: Bundle,
    submodel: Submodel,
    bucket: Bucket,
    cases: Sequence[Case],
    limit: Tolerance,
) -> Iterator[Proof]:
    """Decision, composition and extremes of the chain of ``submodel`` at ``bucket``; none without one."""
    entry = bundle.manifest.exits
    segments = [e for e in bundle.manifest.engines if e.submodel == submodel.id and e.segment and e.bucket == bucket]
    if entry is None or len(segments) < 2:
        return
    references = _references(universal, submodel, cases)
    receipts = [output for engine in segments if engine.parity for output in engine.parity.outputs]
    error = _MARGIN * max(output.max_abs for output in receipts if output.name == entry.entropy)
    mine: dict[str, Residency] = {e.id: "packed" for e in bundle.manifest.engines if e.submodel == submodel.id}
    with ElasticModel(bundle, mine, threads_or_default(None)) as model:
        chain = _Chain(model, submodel.id, f"{submodel.id}@{bucket.label}", references, error, limit)
        for policy in _policies(entry, references):
            yield chain.decisions(policy)
        yield chain.compositions(_policies(entry, references)[0])
        yield chain.extremes(entry.classes)


@dataclass(frozen=True)
class _Chain:
    """One chain through the runtime, and what PyTorch says of the same rows."""

    model: ElasticModel
    submodel: str
    subject: str
    references: Sequence[_Reference]
    error: float
    limit: Tolerance

    def decisions(self, policy: ExitPolicy) -> Proof:
        """Exit by exit, row by row, as PyTorch's entropies have it."""
        checked = differing = 0
        ties: list[str] = []
        for reference in self.references:
            expected, tie = expected_exits(reference.entropy, policy, self.error)
            found = self._indices(reference.case.feeds, policy)
            checked += int((~tie).sum())
            differing += int((found != expected)[~tie].sum())
            ties += [f"case {reference.case.name}, row {row}" for row in np.flatnonzero(tie)]
        return Proof(
            "decision", f"{self.subject}, {policy.name}", max(1, checked), float(differing), 0.0, tuple(ties[:_LISTED])
        )

    def compositions(self, policy: ExitPolicy) -> Proof:
        """The same answers in another order, and alone: largest difference of logits, scaled as parity scales it."""
        worst, checked = 0.0, 0
        for reference in self.references:
            _, tie = expected_exits(reference.entropy, policy, self.error)
            feeds = reference.case.feeds
            together = self._logits(feeds, policy)
            scale = max(1.0, float(np.sqrt(np.mean(np.square(together, dtype=np.float64)))))
            rows = len(together)
            for order in (np.arange(rows)[::-1], np.arange(1), np.arange(rows - 1, rows)):
                again = self._logits(
                    {name: np.ascontiguousarray(array[order]) for name, array in feeds.items()}, policy
                )
                kept = ~tie[order]
                checked += int(kept.sum())
                worst = max(worst, float(np.abs(again - together[order])[kept].max(initial=0.0)) / scale)
        return Proof("composition", self.subject, max(1, checked), worst, self.limit.atol)

    def extremes(self, classes: int) -> Proof:
        """Below zero nobody leaves early; above ln C everybody leaves at the first exit."""
        exits = len(self.references[0].entropy)
        ends = [(closed(exits), exits - 1)]
        ends.append((ExitPolicy((math.log(classes) + 1.0,) * (exits - 1), name="every exit open"), 0))
        wrong = checked = 0
        for policy, expected in ends:
            for reference in self.references:
                found = self._indices(reference.case.feeds, policy)
                checked += len(found)
                wrong += int((found != expected).sum())
        return Proof("extremes", self.subject, checked, float(wrong), 0.0)

    def _indices(self, feeds: Arrays, policy: ExitPolicy) -> np.ndarray:
        exits = self.model(feeds, submodel=self.submodel, exits=policy).exits
        assert exits is not None
        return exits.index

    def _logits(self, feeds: Arrays, policy: ExitPolicy) -> np.ndarray:
        entry = self.model.bundle.manifest.exits
        assert entry is not None
        return self.model(feeds, submodel=self.submodel, exits=policy)[entry.logits]


def expected_exits(entropy: np.ndarray, policy: ExitPolicy, error: float) -> tuple[np.ndarray, np.ndarray]:
    """Where each row leaves by its entropies ``[exits, B]``, and whether a threshold on its way lies within ``error``:
    int64 ``[B]`` and bool ``[B]``."""
    exits, rows = entropy.shape
    index = np.full(rows, exits - 1)
    tie = np.zeros(rows, bool)
    staying = np.ones(rows, bool)
    for exit_index in range(exits - 1):
        tie |= staying & (np.abs(entropy[exit_index] - policy.thresholds[exit_index]) <= error)
        leaving = staying & policy.leaving(exit_index, entropy[exit_index])
        index[leaving] = exit_index
        staying &= ~leaving
    return index, tie


def _references(universal: UniversalModel, submodel: Submodel, cases: Sequence[Case]) -> list[_Reference]:
    exits = universal.source.exits
    assert exits is not None
    assert submodel.depth is not None
    segments = by_segment(exits, universal.narrow(submodel), submodel.depth, cases)
    return [
        _Reference(
            case,
            np.stack([segment[number][exits.entry.logits] for segment in segments]),
            np.stack([segment[number][exits.entry.entropy] for segment in segments]),
        )
        for number, case in enumerate(cases)
    ]


def _policies(entry: ExitsEntry, references: Sequence[_Reference]) -> list[ExitPolicy]:
    """Thresholds under which rows really part: between the middle two of each exit's entropies; and the model's own."""
    pooled = np.concatenate([reference.entropy for reference in references], axis=1)  # [exits, rows of all cases]
    middle = pooled.shape[1] // 2
    between = np.sort(pooled[:-1], axis=1)[:, middle - 1 : middle + 1].mean(axis=1)
    policies = [ExitPolicy(tuple(float(threshold) for threshold in between), name="median thresholds")]
    if entry.gate is not None:
        own = entry.gate.thresholds[: len(pooled) - 1]
        policies.append(ExitPolicy(own, entry.gate.compare, name="the model's own gate"))
    return policies
