"""The segments of a written bundle, as the runtime chains them, against one uncut pass of the PyTorch submodel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.exits_entry import ExitsEntry
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...runtime.device.threads import threads_or_default
from ...runtime.engines.pool import EnginePool
from ...runtime.engines.residency import Residency
from ...runtime.exits.chain import ExitChain, SegmentRun
from ...runtime.exits.policy import closed
from .engine_verdict import EngineVerdict, judge_engine
from .evidence.cases import Case
from .evidence.references import References
from .evidence.replayed import Replayed
from .evidence.rounding import Rounding


def verify_segments(bundle: Bundle, references: References, submodel: Submodel, bucket: Bucket) -> list[EngineVerdict]:
    """One verdict per segment of ``submodel`` at ``bucket``, with every exit closed; packed, as users run them.

    In a range a chain runs no step behind the longest row, so that no case has any here.
    """
    engines = {
        engine.segment: engine
        for engine in bundle.manifest.engines
        if engine.submodel == submodel.id and engine.bucket == bucket and engine.segment is not None
    }
    universal, cases = references.universal, references.cases[bucket]
    exits = universal.source.exits
    if exits is None or not engines:
        return []
    entry = exits.entry
    if entry.trims:
        cases = [_trimmed(case, entry, bucket) for case in cases]
    found: list[list[dict[str, np.ndarray]]] = [[] for _ in engines]

    def keep(run: SegmentRun) -> None:
        arrays = {entry.logits: run.logits.copy(), entry.entropy: run.entropy.copy()}
        if run.state is not None:
            arrays[entry.state_out] = run.state.copy()
        found[run.exit_index].append(arrays)

    here = replace(bundle, manifest=replace(bundle.manifest, engines=tuple(engines.values())))  # no other bucket helps
    residencies: dict[str, Residency] = {engine.id: "packed" for engine in engines.values()}
    pool = EnginePool(here, residencies, threads_or_default(None))
    try:
        chain = ExitChain(here, submodel.id, pool, ())
        for case in cases:
            chain.run(case.request, closed(len(engines)), keep)
    finally:
        pool.close()
    steps = [case.feeds[entry.mask].shape[1] for case in cases]
    reference = [_cut(passed, entry.state_out, steps) for passed in references.by_segment(submodel, bucket)]
    manifest = bundle.manifest
    return [
        EngineVerdict.of(engine, judge_engine(manifest, universal, engine, cases, _fetched(wanted, arrays), arrays))
        for engine, wanted, arrays in zip(engines.values(), reference, found, strict=True)
    ]


def _trimmed(case: Case, entry: ExitsEntry, bucket: Bucket) -> Case:
    """``case`` without the steps behind its longest row that engines of ``bucket`` need not run."""
    longest = 1 + int(np.flatnonzero(case.feeds[entry.mask].any(axis=0)).max())
    steps = bucket.filled(Bucket(1, longest)).sequence
    by_step = {spec.name for spec in entry.segments[0].inputs if spec.dims[1:2] == ("sequence",)}
    cut = {n: np.ascontiguousarray(array[:, :steps]) if n in by_step else array for n, array in case.feeds.items()}
    return replace(case, feeds=cut)


def _cut(passed: Replayed, state: str, steps: Sequence[int]) -> Replayed:
    """``passed`` with so many steps of the output ``state`` ``[B, S, H]`` in each case, if it has that."""
    if state not in passed.outputs[0]:
        return passed
    more = passed.again
    return replace(
        passed,
        outputs=[{**arrays, state: arrays[state][:, :n]} for arrays, n in zip(passed.outputs, steps, strict=True)],
        roundings=[
            {**own, state: _first_places(own[state], n)} for own, n in zip(passed.roundings, steps, strict=True)
        ],
        again=None if more is None else lambda only: _cut(more(only), state, steps),
    )


def _first_places(own: Rounding, count: int) -> Rounding:
    return Rounding(np.asarray(own.max_abs)[:, :count], np.asarray(own.rms)[:, :count])


def _fetched(reference: Replayed, found: Sequence[dict[str, np.ndarray]]) -> Replayed:
    """The reference outputs that the chain fetched: the state behind a submodel's last exit is read by nobody."""
    return reference.of({name: name for name in found[0]})
