"""What the types of a manifest do not say about exits: segments that fit each other, and engines that fit them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..elastic import DEPTH
from .entries.engine_entry import EngineEntry
from .entries.exits_entry import ExitsEntry, SegmentEntry
from .entries.tensor_spec import TensorSpec
from .manifest import Manifest

_BATCH_DIMS = ("batch",)
_STEP_DIMS = ("batch", "sequence")


def exit_problems(manifest: Manifest) -> Iterable[str]:
    """What keeps the chain of segments from running, and engines of one file that differ."""
    yield from _chain_problems(manifest)
    yield from _sharing_problems(manifest)


def _chain_problems(manifest: Manifest) -> Iterable[str]:
    exits = manifest.exits
    if exits is None:
        for engine in manifest.engines:
            if engine.segment is not None:
                yield f"engine {engine.id}: segment {engine.segment!r}, but this manifest has no exits"
        return
    layers = [segment.layer for segment in exits.segments]
    if len(layers) < 2 or layers != sorted(set(layers)):
        yield f"exits: segments end at layers {layers[:80]}; expected at least two, rising"
        return
    names = [segment.name for segment in exits.segments]
    if len(set(names)) != len(names):
        yield f"exits: segments are named {names[:80]}; expected names that differ"
    choices = next((axis.choices for axis in manifest.axes if axis.name == DEPTH), None)
    if not choices or choices[-1] != layers[-1] or not set(choices) <= set(layers):
        yield f"exits: segments end at layers {layers[:80]}, axis {DEPTH} has {list(choices or ())[:80]}"
        return
    if exits.gate and len(exits.gate.thresholds) != len(layers) - 1:
        yield f"exits: {len(exits.gate.thresholds)} thresholds, expected {len(layers) - 1}, for all but the last"
    yield from _interface_problems(manifest, exits)
    yield from _engine_problems(manifest, exits)


def _interface_problems(manifest: Manifest, exits: ExitsEntry) -> Iterable[str]:
    mask = next((spec for spec in manifest.inputs if spec.name == exits.mask), None)
    if mask is None or mask.dims != _STEP_DIMS or not mask.dtype.startswith(("int", "uint", "bool")):
        yield f"exits: mask {exits.mask!r} is not an input of whole numbers [batch, sequence]"
        return
    first = exits.segments[0]
    state = next((spec.dims for spec in first.outputs if spec.name == exits.state_out), ())
    if len(state) != 3 or state[:2] != _STEP_DIMS or not isinstance(state[2], int):
        yield f"exits: {exits.state_out!r} is not an output [batch, sequence, H] of segment {first.name}"
        return
    answer = (
        TensorSpec(exits.logits, "float32", (*_BATCH_DIMS, exits.classes)),
        TensorSpec(exits.entropy, "float32", _BATCH_DIMS),
    )
    passed = TensorSpec(exits.state_out, "float32", state)
    later = (TensorSpec(exits.state_in, "float32", state), mask)
    if not _same(manifest.outputs, answer):
        yield f"outputs are {_described(manifest.outputs)}; expected those of an exit, {_described(answer)}"
    for spec in manifest.inputs:
        if spec.dims[:1] != _BATCH_DIMS or set(spec.dims[1:]) & {"batch"} or "sequence" in spec.dims[2:]:
            yield f"input {spec.name}: dims {list(spec.dims)}; with exits, expected [batch, sequence, ...]"
    for segment in exits.segments:
        inputs = manifest.inputs if segment is first else later
        outputs = answer if segment is exits.segments[-1] else (passed, *answer)
        yield from _differences(segment, "inputs", segment.inputs, inputs)
        yield from _differences(segment, "outputs", segment.outputs, outputs)


def _engine_problems(manifest: Manifest, exits: ExitsEntry) -> Iterable[str]:
    layers = {segment.name: segment.layer for segment in exits.segments}
    depths = {entry.id: entry.values.get(DEPTH, (0,))[0] for entry in manifest.submodels}
    found: dict[tuple[str, Any, str], set[str]] = {}
    for engine in manifest.engines:
        if engine.segment is None:
            continue
        if engine.segment not in layers:
            yield f"engine {engine.id}: segment {engine.segment!r} is not in this manifest"
        elif layers[engine.segment] > depths.get(engine.submodel, 0):
            yield f"engine {engine.id}: submodel {engine.submodel} ends before segment {engine.segment}"
        if engine.weight_bytes is None:
            yield f"engine {engine.id}: a segment without weight_bytes"
        found.setdefault((engine.submodel, engine.bucket, engine.backend), set()).add(engine.segment)
    for (submodel, bucket, _), names in found.items():
        missing = [name for name, layer in layers.items() if layer <= depths.get(submodel, 0) and name not in names]
        if missing:
            yield f"submodel {submodel} at {bucket.label}: has segments, but no {missing[0]}"


def _sharing_problems(manifest: Manifest) -> Iterable[str]:
    """One file is opened once, for whichever engine comes first."""
    owners: dict[str, EngineEntry] = {}
    for engine in manifest.engines:
        plain = replace(engine, id="", submodel="", parity=None)
        if owners.setdefault(engine.file, plain) != plain:
            yield f"engine {engine.id}: differs from another engine of its file {engine.file} in more than its submodel"


def _differences(
    segment: SegmentEntry, what: str, found: tuple[TensorSpec, ...], expected: tuple[TensorSpec, ...]
) -> Iterable[str]:
    if not _same(found, expected):
        yield f"segment {segment.name}: {what} are {_described(found)}; expected {_described(expected)}"


def _same(found: tuple[TensorSpec, ...], expected: tuple[TensorSpec, ...]) -> bool:
    return len(found) == len(expected) and {s.name: s for s in found} == {s.name: s for s in expected}


def _described(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{spec.name[:80]} {spec.dtype} [{', '.join(map(str, spec.dims))}]" for spec in specs[:20])
