"""The segments of one submodel at one bucket: emitted, run on the state that the one before returned, compared; and
verified as written, as the runtime chains them.

They must equal one pass of the PyTorch submodel that nothing cuts: the state, the logits and the entropy at
every exit. Errors of a segment therefore reach the ones behind it, as they do on a device.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry, ExitsEntry, Segment
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...exporters.parts import Exits
from ...runtime.exits.chain import SegmentRun
from ...runtime.exits.policy import closed
from ...runtime.inputs.arrays import Arrays
from ..graph.template import short
from ..parity.cases import Case
from ..parity.compare import Rounding
from ..parity.engine_verdict import EngineVerdict, judge_engine
from ..parity.judge import Replayed
from ..parity.prove_exits import packed_chain
from .build_engine import EngineBuilder
from .engine_references import EngineReferences


def build_segments(builder: EngineBuilder, submodel: Submodel, bucket: Bucket) -> tuple[EngineEntry, ...]:
    """The segment engines of ``submodel`` at ``bucket``, in order; none for a model without exits.

    A submodel shares the files of the deepest one with its widths: it has the first of these segments. Done work of an
    earlier run is kept. Raises ParityError naming the segment and the first module that diverges.
    """
    exits = builder.universal.source.exits
    if exits is None or submodel.depth is None:
        return ()
    deepest, segments = submodel.deepest, exits.entry.segments
    stem = short(deepest.id)
    files = [f"{stem}.{segment.name}.{bucket.label}.onnx" for segment in segments]
    key = f"{stem}.segments.{bucket.label}"
    build = partial(_build, builder, exits, deepest, bucket, files)
    entries = builder.stage.memo(key, tuple[EngineEntry, ...], build, files)
    return tuple(
        _of(submodel, entry)
        for entry, segment in zip(entries, segments, strict=True)
        if segment.layer <= submodel.depth
    )


def _build(
    builder: EngineBuilder, exits: Exits, submodel: Submodel, bucket: Bucket, files: Sequence[str]
) -> tuple[EngineEntry, ...]:
    whole, cases = builder.references.of(submodel), builder.cases[bucket]
    reference = builder.references.by_segment(submodel, bucket)
    entries = []
    for segment, part, file, expected in zip(exits.entry.segments, exits.parts, files, reference, strict=True):
        name = f"{submodel.id}.{segment.name}@{bucket.label}"
        engine = builder.emit(name, file, submodel, bucket, segment.name)
        found = builder.run(engine.entry, [case.feeds for case in cases])
        module = whole.viewed(part.module, segment.outputs)
        entries.append(builder.proven(engine, module, cases, expected, found, submodel))
        cases = [_next(case, outputs, exits) for case, outputs in zip(cases, found, strict=True)]
    return tuple(entries)


def _next(case: Case, outputs: Arrays, exits: Exits) -> Case:
    """The case as the next segment takes it."""
    entry = exits.entry
    if entry.state_out not in outputs:
        return case
    feeds = {entry.state_in: outputs[entry.state_out], entry.mask: case.feeds[entry.mask]}
    return replace(case, feeds=feeds)


def _of(submodel: Submodel, entry: EngineEntry) -> EngineEntry:
    return replace(entry, id=f"{submodel.id}.{entry.segment}@{entry.bucket.label}", submodel=submodel.id)


def verify_segments(bundle: Bundle, references: EngineReferences, first: EngineEntry) -> list[EngineVerdict]:
    """One verdict per segment of the chain that begins with ``first``, with every exit closed; packed, as users run
    them. None for an engine further on in a chain.

    In a range a chain runs no step behind the longest row, so that no case has any here.
    """
    universal, bucket = references.of_model.universal, first.bucket
    submodel = universal.spec.parse(first.submodel)
    engines = {
        engine.segment: engine
        for engine in bundle.manifest.engines
        if engine.submodel == first.submodel and engine.bucket == bucket and isinstance(engine.kind, Segment)
    }
    exits = universal.source.exits
    if exits is None or next(iter(engines.values())) != first:
        return []
    own = references.of(bundle, *engines.values())
    cases, entry = own.cases[bucket], exits.entry
    if entry.trims:
        cases = [_trimmed(case, entry, bucket) for case in cases]
    found: list[list[dict[str, np.ndarray]]] = [[] for _ in engines]

    def keep(run: SegmentRun) -> None:
        arrays = {entry.logits: run.logits.copy(), entry.entropy: run.entropy.copy()}
        if run.state is not None:
            arrays[entry.state_out] = run.state.copy()
        found[run.exit_index].append(arrays)

    with packed_chain(bundle, submodel, [*engines.values()]) as chain:  # no other bucket helps
        for case in cases:
            chain.run(case.request, closed(len(engines)), keep)
    steps = [case.feeds[entry.mask].shape[1] for case in cases]
    reference = [_cut(passed, entry.state_out, steps) for passed in own.by_segment(submodel, bucket)]
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
    return passed.seen(
        lambda outputs, roundings: (
            [{**arrays, state: arrays[state][:, :n]} for arrays, n in zip(outputs, steps, strict=True)],
            [{**own, state: _first_places(own[state], n)} for own, n in zip(roundings, steps, strict=True)],
        )
    )


def _first_places(own: Rounding, count: int) -> Rounding:
    return Rounding(np.asarray(own.max_abs)[:, :count], np.asarray(own.rms)[:, :count])


def _fetched(reference: Replayed, found: Sequence[dict[str, np.ndarray]]) -> Replayed:
    """The reference outputs that the chain fetched: the state behind a submodel's last exit is read by nobody."""
    return reference.of({name: name for name in found[0]})
