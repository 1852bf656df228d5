"""Exits in use: rows leave where PyTorch would let them, whatever batch they are in; the extremes leave first and last.

Every bucket's engines are proven alone, and then together, where batches shrink from one bucket to another. Measured
latencies, which choose buckets on a device, play no part here, so that equal compiles have equal proofs. Engines round,
so an entropy within the measured error of its threshold may fall on either side: such near ties are left out of the
comparison and listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...elastic import Bucket, Submodel
from ...exporters.universal import UniversalModel
from ...runtime.bundle.manifest import EngineEntry, ExitsEntry, ParityOutput, Proof
from ...runtime.bundle.open_bundle import Bundle
from ...runtime.engines.contract.residency import Residency
from ...runtime.engines.contract.threads import threads_or_default
from ...runtime.engines.pool import EnginePool
from ...runtime.exits.chain import ChainRun, ExitChain
from ...runtime.exits.policy import ExitPolicy, closed
from .cases import Case
from .compare import Tolerance, widened
from .reference import Reference, References
from .segment_references import by_segment

# A receipt's error is that of engines run shared at one shape; packed, and in smaller batches, they round otherwise.
_ENTROPY_ERROR_FACTOR = 2.0


@dataclass(frozen=True)
class _Reference:
    """PyTorch's logits ``[exits, B, C]`` and entropies ``[exits, B]`` of one case."""

    case: Case
    logits: np.ndarray
    entropy: np.ndarray


# Two answers, and the row of the first for each row of the second.
_Pair = tuple[ChainRun, ChainRun, np.ndarray]


def prove_exits(
    universal: UniversalModel,
    bundle: Bundle,
    submodel: Submodel,
    modules: References,
    cases: Mapping[Bucket, Sequence[Case]],
    limit: Tolerance,
) -> Iterator[Proof]:
    """Decisions, extremes and composition of the chain of ``submodel``; none if it has fewer than two exits."""
    entry = bundle.manifest.exits
    segments = [engine for engine in bundle.manifest.engines if engine.submodel == submodel.id and engine.segment]
    if entry is None or len({engine.segment for engine in segments}) < 2:
        return
    error, module = _entropy_error(segments, entry), modules.of(submodel)
    own = max(figures.float32_max_abs or 0.0 for figures in _receipts(segments, entry.logits))
    for bucket, given in cases.items():
        references = _references(universal, module, submodel, given)
        policies = _policies(entry, references)
        subject = f"{submodel.id}@{bucket.label}"
        with _chain(bundle, submodel, [engine for engine in segments if engine.bucket == bucket]) as chain:
            for policy in policies:
                yield _decisions(chain, policy, references, error, subject)
            yield _extremes(chain, references, entry.classes, subject)
            if bucket.batch > 1:
                pairs = partial(_neighbours, chain, policies[0])
                yield _composition(pairs, policies[0], references, error, limit, own, subject)
    largest = max(cases, key=lambda bucket: (bucket.tokens, bucket))
    if len(cases) > 1 and largest.batch > 1:
        references = _references(universal, module, submodel, cases[largest])
        policy = _policies(entry, references)[0]
        with (
            _chain(bundle, submodel, [engine for engine in segments if engine.bucket == largest]) as alone,
            _chain(bundle, submodel, segments) as together,
        ):
            pairs = partial(_shrinking, alone, together, policy)
            yield _composition(pairs, policy, references, error, limit, own, f"{submodel.id}, all buckets")


@contextmanager
def _chain(bundle: Bundle, submodel: Submodel, engines: Sequence[EngineEntry]) -> Iterator[ExitChain]:
    """The chain on these engines alone, packed."""
    here = replace(bundle, manifest=replace(bundle.manifest, engines=tuple(engines)))
    residencies: dict[str, Residency] = {engine.id: "packed" for engine in engines}
    pool = EnginePool(here, residencies, threads_or_default(None))
    try:
        yield ExitChain(here, submodel.id, pool, ())
    finally:
        pool.close()


def _decisions(
    chain: ExitChain, policy: ExitPolicy, references: Sequence[_Reference], error: float, subject: str
) -> Proof:
    """Exit by exit, row by row, as PyTorch's entropies have it."""
    checked = differing = 0
    ties: list[str] = []
    for reference in references:
        expected, tie = expected_exits(reference.entropy, policy, error)
        found = chain.run(reference.case.request, policy).index
        checked += int((~tie).sum())
        differing += int((found != expected)[~tie].sum())
        ties += [f"case {reference.case.name}, row {row}" for row in np.flatnonzero(tie)]
    return Proof("decision", f"{subject}, {policy.name}", checked, float(differing), 0.0, tuple(ties))


def _extremes(chain: ExitChain, references: Sequence[_Reference], classes: int, subject: str) -> Proof:
    """Below zero nobody leaves early; above ln C everybody leaves at the first exit."""
    opened = ExitPolicy((math.log(classes) + 1.0,) * (chain.exits - 1), name="every exit open")
    wrong = checked = 0
    for policy, expected in ((closed(chain.exits), chain.exits - 1), (opened, 0)):
        for reference in references:
            found = chain.run(reference.case.request, policy).index
            checked += len(found)
            wrong += int((found != expected).sum())
    return Proof("extremes", subject, checked, float(wrong), 0.0)


def _neighbours(chain: ExitChain, policy: ExitPolicy, reference: _Reference) -> Iterator[_Pair]:
    """The rows together, then in another order, and with no other row."""
    feeds = reference.case.request
    together = chain.run(feeds, policy)
    rows = len(together.index)
    for order in (np.arange(rows)[::-1], np.arange(1), np.arange(rows - 1, rows)):
        picked = {name: np.ascontiguousarray(array[order]) for name, array in feeds.items()}
        yield together, chain.run(picked, policy), order


def _shrinking(alone: ExitChain, together: ExitChain, policy: ExitPolicy, reference: _Reference) -> Iterator[_Pair]:
    """Every row in the largest bucket to the end, and batches that shrink as rows leave."""
    one = alone.run(reference.case.request, policy)
    yield one, together.run(reference.case.request, policy), np.arange(len(one.index))


def _composition(
    pairs: Callable[[_Reference], Iterator[_Pair]],
    policy: ExitPolicy,
    references: Sequence[_Reference],
    error: float,
    limit: Tolerance,
    own: float,
    subject: str,
) -> Proof:
    """The same answers whatever rows a row is run with: largest scaled difference of logits, which may be as large as
    the gate allows where PyTorch's ``own`` float32 is off by so much."""
    worst, checked = 0.0, 0
    scale = min(_scale(reference.logits) for reference in references)
    for reference in references:
        _, tie = expected_exits(reference.entropy, policy, error)
        for one, other, order in pairs(reference):
            kept = ~tie[order]
            checked += int(kept.sum())
            worst = max(worst, _difference(one, other, order, kept))
    return Proof("composition", subject, checked, worst, widened(limit.atol, own / scale))


def _difference(one: ChainRun, other: ChainRun, order: np.ndarray, kept: np.ndarray) -> float:
    """Of the rows ``order`` of ``one`` and all of ``other``; infinite where a kept row left at another exit."""
    if (one.index[order] != other.index)[kept].any():
        return math.inf
    return float(np.abs(one.logits[order] - other.logits)[kept].max(initial=0.0)) / _scale(one.logits)


def _scale(logits: np.ndarray) -> float:
    return max(1.0, float(np.sqrt(np.mean(np.square(logits, dtype=np.float64)))))


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


def _references(
    universal: UniversalModel, module: Reference, submodel: Submodel, cases: Sequence[Case]
) -> list[_Reference]:
    exits = universal.source.exits
    assert exits is not None
    assert submodel.depth is not None
    segments = [segment.outputs for segment in by_segment(exits, module, submodel.depth, cases)]
    return [
        _Reference(
            case,
            np.stack([segment[number][exits.entry.logits] for segment in segments]),
            np.stack([segment[number][exits.entry.entropy] for segment in segments]),
        )
        for number, case in enumerate(cases)
    ]


def _entropy_error(segments: Sequence[EngineEntry], entry: ExitsEntry) -> float:
    """By how much an engine's entropy may differ from PyTorch's, as measured when the engines were built."""
    return _ENTROPY_ERROR_FACTOR * max(output.max_abs for output in _receipts(segments, entry.entropy))


def _receipts(segments: Sequence[EngineEntry], name: str) -> list[ParityOutput]:
    """What the receipts of ``segments`` say of one output."""
    found = [output for engine in segments if engine.parity for output in engine.parity.outputs]
    return [output for output in found if output.name == name]


def _policies(entry: ExitsEntry, references: Sequence[_Reference]) -> list[ExitPolicy]:
    """Thresholds under which rows really part: about half of them at each exit; and the model's own."""
    pooled = np.concatenate([reference.entropy for reference in references], axis=1)  # [exits, rows of all cases]
    parting = tuple(_widest_gap(np.sort(entropies)) for entropies in pooled[:-1])
    policies = [ExitPolicy(parting, name="parting thresholds")]
    if entry.gate is not None:
        own = entry.gate.thresholds[: len(pooled) - 1]
        policies.append(ExitPolicy(own, entry.gate.compare, name="the model's own gate"))
    return policies


def _widest_gap(entropies: np.ndarray) -> float:
    """The middle of the widest gap within the middle half of rising ``entropies``, as far as there are gaps."""
    if len(entropies) == 1:
        return float(entropies[0])
    quarter = len(entropies) // 4
    low, high = quarter, max(quarter + 1, len(entropies) - 1 - quarter)
    place = low + int(np.argmax(np.diff(entropies[low : high + 1])))
    return float((entropies[place] + entropies[place + 1]) / 2)
