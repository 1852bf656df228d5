"""Checks of exits, generation and tasks beyond the types of a manifest: parts that fit each other, and engines
that fit them."""

import re
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

from ..bucket import Bucket
from ..elastic import DEPTH
from ..profiles.backends import BACKENDS
from .entries.engine_entry import Decode, Encoder, EngineEntry, ExitsEntry, SegmentEntry
from .entries.generation_entry import EncoderEntry, GenerationEntry
from .entries.tensor_spec import MAX_ELEMENTS, TensorSpec
from .manifest import Manifest

_BATCH_DIMS = ("batch",)
_STEP_DIMS = ("batch", "sequence")
_MAX_LAYERS = 4096
# Numbers of one token in the keys, or the values, of all layers; models of hundreds of layers have less than a tenth.
_MAX_CACHED = 2**22
# Numbers of all recurrent states of a row.
_MAX_STATES = 2**30
_MAX_RANK = 8
_SHA256 = re.compile(r"[0-9a-f]{64}")


def exit_problems(manifest: Manifest) -> Iterable[str]:
    """Problems that keep the chain of segments from running, and engines of one file that differ."""
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
    yield from _segment_problems(manifest, exits)


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


def _segment_problems(manifest: Manifest, exits: ExitsEntry) -> Iterable[str]:
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


def generation_problems(manifest: Manifest) -> Iterable[str]:
    """Problems that keep the bundle from generating; nothing where it does not."""
    entry = manifest.generation
    if entry is None:
        return
    for what, each in (("layers", entry.layers), ("states", entry.states)):
        if not (entry.layers or entry.states) or len(each) > _MAX_LAYERS:
            yield f"generation: {len(each)} {what}; expected 1..{_MAX_LAYERS}"
    if any(len(shape) >= _MAX_RANK or min(shape, default=1) < 1 for shape in entry.states):
        yield f"generation: a state has more than {_MAX_RANK} dimensions, or one that is empty"
    elif (kept := sum(map(prod, entry.states))) > _MAX_STATES:
        yield f"generation: the states of a row have {kept} numbers, more than {_MAX_STATES}"
    if not entry.engines:
        yield "generation: expected at least one engine"
    for number, layer in enumerate(entry.layers):
        if layer.heads * layer.size * entry.positions > MAX_ELEMENTS:
            yield f"generation: layer {number} keeps more than {MAX_ELEMENTS} numbers at {entry.positions} positions"
    if (cached := sum(layer.heads * layer.size for layer in entry.layers)) > _MAX_CACHED:
        yield f"generation: all layers keep {cached} numbers of a token, more than {_MAX_CACHED}"
    places = [(engine.submodel, engine.capacity) for engine in entry.engines]
    for submodel, capacity in {place for place in places if places.count(place) > 1}:
        of_one_size = "" if capacity is None else f" at capacity {capacity}"
        yield f"generation: submodel {submodel} has several engines{of_one_size}; expected one"
    if len({frozenset(own.capacity for own in entry.siblings(engine)) for engine in entry.engines}) > 1:
        yield "generation: engines of some submodels have other capacities; expected the same of all"
    suppressed = (*(entry.suppressed_ids or ()), *(entry.suppressed_first_ids or ()))
    begins = [] if entry.begin_id is None else [entry.begin_id]
    for name, ids in (("end_ids", entry.end_ids), ("begin_id", begins), ("suppressed_ids", suppressed)):
        if any(not 0 <= number < entry.vocabulary for number in ids):
            yield f"generation: {name} {list(ids)[:80]}; expected numbers below the vocabulary of {entry.vocabulary}"
    for file in {entry.chat_template, entry.tokenizer} - {None, *(each.path for each in manifest.files)}:
        yield f"generation: file {file!r} is not among the files"
    for engine in entry.engines:
        yield from _engine_problems(engine, entry)
        if entry.states and engine.bucket.sequence != 1:
            yield f"engine {engine.id}: {engine.bucket.sequence} new tokens; with states, expected one"
    if entry.encoder is not None:
        yield from _encoder_problems(entry.encoder, entry, manifest.inputs)


def _engine_problems(engine: EngineEntry, entry: GenerationEntry) -> Iterable[str]:
    if not isinstance(engine.kind, Decode):
        yield f"engine {engine.id}: kind {engine.kind.name!r}; engines that generate have {Decode.name!r}"
    if engine.bucket.smallest.tokens != 1:
        yield f"engine {engine.id}: bucket {engine.bucket}; expected one that begins with 1 row of 1 token"
    if engine.bucket.sequence > entry.positions:
        yield f"engine {engine.id}: {engine.bucket.sequence} new tokens, more than the {entry.positions} positions"
    if (engine.capacity is None) != (not BACKENDS[engine.backend].fixed_caches):
        yield f"engine {engine.id}: capacity {engine.capacity}; engines for tensorrt have one, others none"
    if engine.capacity is not None and not engine.bucket.sequence <= engine.capacity <= entry.positions:
        yield (
            f"engine {engine.id}: capacity {engine.capacity}; expected {engine.bucket.sequence}, its new tokens, to "
            f"{entry.positions}, the positions"
        )
    if engine.weight_bytes is None:
        yield f"engine {engine.id}: an engine that generates without weight_bytes"
    yield from _cache_layout_problems(engine, entry)
    if engine.bucket.batch * entry.vocabulary > MAX_ELEMENTS:
        yield f"engine {engine.id}: logits of {engine.bucket.batch} rows have more than {MAX_ELEMENTS} elements"


def _cache_layout(engine: EngineEntry) -> dict[str, tuple[int, ...] | None]:
    """The engine's statements on its cache and on prompts, by the names of the manifest."""
    return dict(zip(("cache_heads", "cache_sizes", "source_heads", "source_sizes"), engine.cache_layout, strict=True))


def _cache_layout_problems(engine: EngineEntry, entry: GenerationEntry) -> Iterable[str]:
    for name, stated in _cache_layout(engine).items():
        if stated is None:
            continue
        layers = entry.layers if name.startswith("cache") else entry.source_layers
        most = [layer.heads if name.endswith("heads") else layer.size for layer in layers]
        if name.startswith("source") and entry.encoder is None:
            yield f"engine {engine.id}: {name}, of a model without an encoder"
            continue
        # A submodel of fewer layers has no cache of the last ones.
        least = [0 if name == "cache_heads" and place else 1 for place in range(len(most))]
        if len(stated) != len(most) or any(not a <= b <= c for a, b, c in zip(least, stated, most, strict=False)):
            yield f"engine {engine.id}: {name} {list(stated)[:80]}; expected 1 to {most[:80]}"


def _encoder_problems(encoder: EncoderEntry, entry: GenerationEntry, inputs: tuple[TensorSpec, ...]) -> Iterable[str]:
    tokens = [("start_id", encoder.start_id), ("first_id", encoder.first_id), ("last_id", encoder.last_id)]
    for name, token in [*tokens, *(("begin_ids", token) for token in encoder.begin_ids or ())]:
        if token is not None and token >= entry.vocabulary:
            yield f"generation: {name} {token}; expected a number below the vocabulary of {entry.vocabulary}"
    given = encoder.input
    if given is not None and (given not in inputs or given.dtype != "float32" or "sequence" in given.dims):
        yield f"generation: input {given.name[:80]!r} of an encoder; expected one of the inputs, float32, of one shape"
    if sorted(engine.submodel for engine in encoder.engines) != sorted({engine.submodel for engine in entry.engines}):
        yield "generation: expected an encoder for each submodel that generates, and no other"
    if len(entry.source_layers) != len(entry.layers):
        yield f"generation: an encoder for {len(entry.source_layers)} layers; expected {len(entry.layers)}"
    for layer in entry.source_layers:
        if layer.heads * layer.size * encoder.positions > MAX_ELEMENTS:
            yield f"generation: an encoder returns more than {MAX_ELEMENTS} numbers at {encoder.positions} positions"
    for engine in encoder.engines:
        yield from _cache_layout_problems(engine, entry)
        if not isinstance(engine.kind, Encoder):
            yield f"engine {engine.id}: kind {engine.kind.name!r}; engines that read a prompt have {Encoder.name!r}"
        if encoder.input is None and (engine.bucket.batch != 1 or engine.bucket.smallest.tokens != 1):
            yield f"engine {engine.id}: bucket {engine.bucket}; expected one row that begins with 1 token"
        if encoder.input is not None and engine.bucket != Bucket(1, encoder.positions):
            yield f"engine {engine.id}: bucket {engine.bucket}; expected one row of {encoder.positions} places"
        if engine.bucket.sequence != encoder.positions:
            yield f"engine {engine.id}: takes {engine.bucket.sequence} tokens; expected {encoder.positions}"
        if any(engine.backend != other.backend for other in entry.engines):
            yield f"engine {engine.id}: backend {engine.backend}; expected that of the engines which read what it makes"
        if engine.weight_bytes is None:
            yield f"engine {engine.id}: an engine that generates without weight_bytes"


def _task_place(engine: EngineEntry) -> str:
    """Whose place the engine has: what stands at it takes the same inputs."""
    return f"{engine.submodel} {engine.segment or ''} {engine.bucket.label} {engine.backend} {engine.capacity or ''}"


def task_problems(manifest: Manifest) -> Iterable[str]:
    """Tensors that no engine takes, or that do not lie on the axes."""
    tasks = manifest.tasks
    if tasks is None:
        return
    if not _SHA256.fullmatch(tasks.base_sha256):
        yield f"tasks: base_sha256 {tasks.base_sha256[:80]!r}; expected 64 lower-case hexadecimal digits"
    if not tasks.tensors:
        yield "tasks: expected at least one tensor"
    others = (engine for engine in manifest.every_engine if "tasks" not in BACKENDS[engine.backend].kinds)
    if manifest.exits is not None or any(others):
        yield "tasks: expected engines for onnxruntime, of a model without exits"
    if tasks.merged and sorted(map(_task_place, tasks.merged)) != sorted(map(_task_place, manifest.every_engine)):
        yield "tasks: merged; expected one for every engine that takes tasks, and no other"
    axes = {axis.name: axis for axis in manifest.axes}
    taken = {spec.name for specs in (manifest.inputs, manifest.outputs) for spec in specs}
    for tensor in tasks.tensors:
        shape = list(tensor.shape)[:_MAX_RANK]
        if tensor.name in taken:
            yield f"tasks: tensor {tensor.name[:80]!r} stands twice, or is an input or output"
        taken.add(tensor.name)
        if not 1 <= len(tensor.shape) <= _MAX_RANK or any(size < 1 for size in tensor.shape):
            yield f"tasks: tensor {tensor.name[:80]}: shape {shape}; expected 1 to {_MAX_RANK} positive numbers"
        elif prod(tensor.shape) > MAX_ELEMENTS:
            yield f"tasks: tensor {tensor.name[:80]} has more than {MAX_ELEMENTS} elements"
        if tensor.axis is not None:
            axis = axes.get(tensor.axis)
            if axis is None or axis.choices is not None or [axis.size * tensor.unit] != shape[:1]:
                yield (
                    f"tasks: tensor {tensor.name[:80]}: shape {shape} does not begin with {tensor.unit} for each step "
                    f"of an axis {tensor.axis[:80]!r}"
                )
