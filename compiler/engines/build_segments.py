"""The segments of one submodel at one bucket: emitted, run on the state that the one before returned, compared.

What they must equal is one pass of the PyTorch submodel that nothing cuts: the state, the logits and the entropy at
every exit. Errors of a segment therefore reach the ones behind it, as they do on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry
from ...elastic import Submodel
from ...errors import ParityError
from ...exporters.parts import Exits
from ...runtime.inputs.arrays import Arrays
from ...strict import structure, unstructure
from ..parity.evidence.cases import Case
from .build_engine import EngineBuilder
from .engine_names import short


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
    receipt = f"{stem}.segments.{bucket.label}.json"
    builder.forget_unless(receipt, files)
    data = builder.stage.once_json(receipt, lambda: unstructure(_build(builder, exits, deepest, bucket, files)))
    entries = [structure(EngineEntry, item, receipt, ParityError) for item in data]
    return tuple(
        _of(submodel, entry)
        for entry, segment in zip(entries, segments, strict=True)
        if segment.layer <= submodel.depth
    )


def _build(
    builder: EngineBuilder, exits: Exits, submodel: Submodel, bucket: Bucket, files: Sequence[str]
) -> list[EngineEntry]:
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
    return entries


def _next(case: Case, outputs: Arrays, exits: Exits) -> Case:
    """The case as the next segment takes it."""
    entry = exits.entry
    if entry.state_out not in outputs:
        return case
    feeds = {entry.state_in: outputs[entry.state_out], entry.mask: case.feeds[entry.mask]}
    return replace(case, feeds=feeds)


def _of(submodel: Submodel, entry: EngineEntry) -> EngineEntry:
    return replace(entry, id=f"{submodel.id}.{entry.segment}@{entry.bucket.label}", submodel=submodel.id)
