"""Exits in use: rows leave where PyTorch would let them, whatever batch they are in; the extremes leave first and last.

Every bucket's engines are proven alone, and then together, where batches shrink from one bucket to another; in a range
they shrink to the rows that stay. Measured latencies, which choose buckets on a device, play no part here, so that
equal compiles have equal proofs. Engines round, so an entropy within the measured error of its threshold may fall on
either side: such near ties are left out of the comparison and listed. Where engines are off by so much that nearly all
rows are, nothing would be proved, and the compile says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...bundle.entries.engine_entry import EngineEntry, ExitsEntry, ParityOutput
from ...bundle.manifest import Proof
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...errors import ParityError
from ...runtime.device.threads import threads_or_default
from ...runtime.engines.residency import Residency
from ...runtime.engines.runner import EnginePool
from ...runtime.exits.chain import ChainRun, ExitChain
from ...runtime.exits.policy import ExitPolicy, closed
from .cases import Case
from .compare import Tolerance, size_of, with_rounding
from .judge import Replayed
from .references import References

# Further passes of PyTorch in float32, on every case, before a composition beyond its limit is believed.
_MORE_PASSES = 7
# A receipt's error is that of engines run shared at one shape; packed, and in smaller batches, they round otherwise.
_ENTROPY_ERROR_FACTOR = 2.0
# Share of the rows of all cases: fewer that are no near ties prove nothing where entropies are off by more than this of
# ln C. Where they are not, rows are near ties since their entropies are equal, such as 0 at a saturated exit.
_MIN_SHARE_CHECKED = 0.25
_MAX_ENTROPY_ERROR = 0.1


@dataclass(frozen=True)
class _Reference:
    """PyTorch's logits ``[exits, B, C]`` and entropies ``[exits, B]`` of one case, and what its own float32 is off by
    at most in each row's logits, ``[exits, B]``."""

    case: Case
    logits: np.ndarray
    entropy: np.ndarray
    own: np.ndarray


# Two answers, and the row of the first for each row of the second.
_Pair = tuple[ChainRun, ChainRun, np.ndarray]


def prove_exits(bundle: Bundle, submodel: Submodel, pytorch: References, limit: Tolerance) -> Iterator[Proof]:
    """Decisions, extremes and composition of the chain of ``submodel``; none if it has fewer than two exits."""
    entry = bundle.manifest.exits
    segments = [engine for engine in bundle.manifest.engines if engine.submodel == submodel.id and engine.segment]
    if entry is None or len({engine.segment for engine in segments}) < 2:
        return
    error, cases = _entropy_error(segments, entry), pytorch.cases
    for bucket, given in cases.items():
        passes = pytorch.by_segment(submodel, bucket)
        references = _references(entry, passes, given)
        policies = _policies(entry, references)
        subject = f"{submodel.id}@{bucket.label}"
        with packed_chain(bundle, submodel, [engine for engine in segments if engine.bucket == bucket]) as chain:
            for policy in policies:
                yield _decisions(chain, policy, references, error, entry.classes, subject)
            yield _extremes(chain, references, entry.classes, subject)
            if bucket.batch > 1:
                pairs = partial(_neighbours, chain, policies[0])
                again = partial(_again, entry, passes, given)
                yield _composition(pairs, policies[0], references, again, error, limit, subject)
    largest = max(cases, key=lambda bucket: (bucket.tokens, bucket))
    if len(cases) > 1 and largest.batch > 1:
        passes = pytorch.by_segment(submodel, largest)
        references = _references(entry, passes, cases[largest])
        policy = _policies(entry, references)[0]
        with (
            packed_chain(bundle, submodel, [engine for engine in segments if engine.bucket == largest]) as alone,
            packed_chain(bundle, submodel, segments) as together,
        ):
            pairs = partial(_shrinking, alone, together, policy)
            again = partial(_again, entry, passes, cases[largest])
            yield _composition(pairs, policy, references, again, error, limit, f"{submodel.id}, all buckets")


@contextmanager
def packed_chain(bundle: Bundle, submodel: Submodel, engines: Sequence[EngineEntry]) -> Iterator[ExitChain]:
    """The chain on these engines alone, packed."""
    here = replace(bundle, manifest=replace(bundle.manifest, engines=tuple(engines)))
    residencies: dict[str, Residency] = {engine.id: "packed" for engine in engines}
    pool = EnginePool(here, residencies, threads_or_default(None))
    try:
        yield ExitChain(here, submodel.id, pool, ())
    finally:
        pool.close()


def _decisions(
    chain: ExitChain,
    policy: ExitPolicy,
    references: Sequence[_Reference],
    error: float,
    classes: int,
    subject: str,
) -> Proof:
    """Exit by exit, row by row, as PyTorch's entropies have it.

    Raises ParityError where nearly every row is a near tie because engines are off by much.
    """
    checked = differing = rows = 0
    ties: list[str] = []
    for reference in references:
        expected, tie = expected_exits(reference.entropy, policy, error)
        found = chain.run(reference.case.request, policy).index
        rows += len(tie)
        checked += int((~tie).sum())
        differing += int((found != expected)[~tie].sum())
        ties += [f"case {reference.case.name}, row {row}" for row in np.flatnonzero(tie)]
    if checked < _MIN_SHARE_CHECKED * rows and error > _MAX_ENTROPY_ERROR * math.log(classes):
        raise ParityError(
            f"decision suite, {subject}, {policy.name}: {rows - checked} of {rows} rows have an entropy within "
            f"{error:.3g} of a threshold, {_ENTROPY_ERROR_FACTOR:g} times what engines are off by; no comparison would "
            "prove where rows leave"
        )
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
    """The rows together, then in another order, and with no other row; of several rows."""
    feeds = reference.case.request
    rows = reference.entropy.shape[1]
    if rows == 1:
        return
    together = chain.run(feeds, policy)
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
    again: Callable[[], Sequence[_Reference]],
    error: float,
    limit: Tolerance,
    subject: str,
) -> Proof:
    """The same answers whatever rows a row is run with: the largest difference of logits, scaled.

    Where PyTorch's own float32 takes up more than half of the limit in a row, the figure of that row is smaller by as
    much as the gate allows it more. Where the limit is broken all the same, that is measured ``again``.
    """
    compared = [(reference, list(pairs(reference))) for reference in references]
    proof = _composed(compared, policy, error, limit, subject)
    if proof.worst <= proof.limit:
        return proof
    better = [(reference, found) for reference, (_, found) in zip(again(), compared, strict=True)]
    return _composed(better, policy, error, limit, subject)


def _composed(
    compared: Sequence[tuple[_Reference, Sequence[_Pair]]],
    policy: ExitPolicy,
    error: float,
    limit: Tolerance,
    subject: str,
) -> Proof:
    figures, checked = [0.0], 0
    for reference, found in compared:
        _, tie = expected_exits(reference.entropy, policy, error)
        for one, other, order in found:
            kept = ~tie[order]
            checked += int(kept.sum())
            figures.append(_difference(one, other, order, kept, reference.own, limit.atol))
    return Proof("composition", subject, checked, float(np.max(figures)), limit.atol)  # NaN if any is


def _difference(
    one: ChainRun, other: ChainRun, order: np.ndarray, kept: np.ndarray, own: np.ndarray, atol: float
) -> float:
    """Largest difference between the rows ``order`` of ``one`` and all of ``other``; infinite where a kept row left at
    another exit."""
    if (one.index[order] != other.index)[kept].any():
        return math.inf
    off = np.abs(one.logits[order] - other.logits).max(axis=-1)  # [rows]
    limit = atol * size_of(one.logits)
    allowed = with_rounding(limit, own[one.index[order], order])
    return float((off / allowed)[kept].max(initial=0.0)) * atol


def expected_exits(entropy: np.ndarray, policy: ExitPolicy, error: float) -> tuple[np.ndarray, np.ndarray]:
    """Where each row leaves by its entropies ``[exits, B]``, and whether a threshold on its way lies within ``error``:
    int64 ``[B]`` and bool ``[B]``."""
    exits, rows = entropy.shape
    index = np.full(rows, exits - 1)
    tie = np.zeros(rows, bool)
    staying = np.ones(rows, bool)
    for exit_index in range(exits - 1):
        tie |= staying & (np.abs(entropy[exit_index] - policy.thresholds[exit_index]) <= error)
        leaving = staying & np.array(policy.leavers(exit_index, entropy[exit_index].tolist()))
        index[leaving] = exit_index
        staying &= ~leaving
    return index, tie


def _references(entry: ExitsEntry, passes: Sequence[Replayed], cases: Sequence[Case]) -> list[_Reference]:
    return [
        _Reference(
            case,
            np.stack([segment.outputs[number][entry.logits] for segment in passes]),
            np.stack([segment.outputs[number][entry.entropy] for segment in passes]),
            np.stack([segment.roundings[number][entry.logits].max_abs for segment in passes]),
        )
        for number, case in enumerate(cases)
    ]


def _again(entry: ExitsEntry, passes: Sequence[Replayed], cases: Sequence[Case]) -> list[_Reference]:
    """With more passes of PyTorch's float32 behind what it is off by."""
    every = {case.name for case in cases}
    return _references(entry, [segment.after_passes(every, _MORE_PASSES) for segment in passes], cases)


def _entropy_error(segments: Sequence[EngineEntry], entry: ExitsEntry) -> float:
    """By how much an engine's entropy may differ from PyTorch's, as measured when the engines were built."""
    return _ENTROPY_ERROR_FACTOR * max(output.max_abs for output in _receipts(segments, entry.entropy))


def _receipts(segments: Sequence[EngineEntry], name: str) -> list[ParityOutput]:
    """Figures of one output in the receipts of ``segments``."""
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
