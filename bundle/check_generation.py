"""What the types of a manifest do not say about generation: engines that fit it, and a cache that a host can hold."""

from __future__ import annotations

from collections.abc import Iterable

from .entries.engine_entry import EngineEntry
from .entries.generation_entry import CACHED, ENCODER, EncoderEntry, GenerationEntry
from .entries.tensor_spec import MAX_ELEMENTS
from .manifest import Manifest

_MAX_LAYERS = 4096
# Of one token, keys or values of all layers; models of hundreds of layers keep less than a tenth.
_MAX_KEPT = 2**22


def generation_problems(manifest: Manifest) -> Iterable[str]:
    """What keeps the bundle from generating; nothing where it does not."""
    entry = manifest.generation
    for engine in manifest.engines:
        stated = {**_kept(engine), "capacity": engine.capacity}
        for what in [name for name, value in stated.items() if value is not None][:1]:
            yield f"engine {engine.id}: {what}, of an engine that keeps no cache"
    if entry is None:
        return
    if not entry.layers or len(entry.layers) > _MAX_LAYERS:
        yield f"generation: {len(entry.layers)} layers; expected 1..{_MAX_LAYERS}"
    if not entry.engines:
        yield "generation: expected at least one engine"
    for number, layer in enumerate(entry.layers):
        if layer.heads * layer.size * entry.positions > MAX_ELEMENTS:
            yield f"generation: layer {number} keeps more than {MAX_ELEMENTS} numbers at {entry.positions} positions"
    if (kept := sum(layer.heads * layer.size for layer in entry.layers)) > _MAX_KEPT:
        yield f"generation: all layers keep {kept} numbers of a token, more than {_MAX_KEPT}"
    places = [(engine.submodel, engine.capacity) for engine in entry.engines]
    for submodel, capacity in {place for place in places if places.count(place) > 1}:
        of_one_size = "" if capacity is None else f" at capacity {capacity}"
        yield f"generation: submodel {submodel} has several engines{of_one_size}; expected one"
    if len({frozenset(own.capacity for own in entry.siblings(engine)) for engine in entry.engines}) > 1:
        yield "generation: engines of some submodels have other capacities; expected the same of all"
    for name, ids in (("end_ids", entry.end_ids), ("begin_id", [] if entry.begin_id is None else [entry.begin_id])):
        if any(not 0 <= number < entry.vocabulary for number in ids):
            yield f"generation: {name} {list(ids)[:80]}; expected numbers below the vocabulary of {entry.vocabulary}"
    if entry.chat_template not in (None, *(file.path for file in manifest.files)):
        yield f"generation: file {entry.chat_template!r} is not among the files"
    for engine in entry.engines:
        yield from _engine_problems(engine, entry)
    if entry.encoder is not None:
        yield from _encoder_problems(entry.encoder, entry)


def _engine_problems(engine: EngineEntry, entry: GenerationEntry) -> Iterable[str]:
    if engine.segment != CACHED:
        yield f"engine {engine.id}: segment {engine.segment!r}; engines that generate have {CACHED!r}"
    if engine.bucket.smallest.tokens != 1:
        yield f"engine {engine.id}: bucket {engine.bucket}; expected one that begins with 1 row of 1 token"
    if engine.bucket.sequence > entry.positions:
        yield f"engine {engine.id}: {engine.bucket.sequence} new tokens, more than the {entry.positions} positions"
    if (engine.capacity is None) != (engine.backend == "onnxruntime"):
        yield f"engine {engine.id}: capacity {engine.capacity}; engines for tensorrt have one, others none"
    if engine.capacity is not None and not engine.bucket.sequence <= engine.capacity <= entry.positions:
        yield (
            f"engine {engine.id}: capacity {engine.capacity}; expected {engine.bucket.sequence}, its new tokens, to "
            f"{entry.positions}, the positions"
        )
    if engine.weight_bytes is None:
        yield f"engine {engine.id}: an engine that generates without weight_bytes"
    yield from _kept_problems(engine, entry)
    if engine.bucket.batch * entry.vocabulary > MAX_ELEMENTS:
        yield f"engine {engine.id}: logits of {engine.bucket.batch} rows have more than {MAX_ELEMENTS} elements"


def _kept(engine: EngineEntry) -> dict[str, tuple[int, ...] | None]:
    """What an engine says of its cache and of prompts, by the names of the manifest."""
    return dict(zip(("cache_heads", "cache_sizes", "source_heads", "source_sizes"), engine.kept, strict=True))


def _kept_problems(engine: EngineEntry, entry: GenerationEntry) -> Iterable[str]:
    for name, stated in _kept(engine).items():
        if stated is None:
            continue
        layers = entry.layers if name.startswith("cache") else entry.source_layers
        most = [layer.heads if name.endswith("heads") else layer.size for layer in layers]
        if name.startswith("source") and entry.encoder is None:
            yield f"engine {engine.id}: {name}, of a model without an encoder"
        elif len(stated) != len(most) or any(not 1 <= own <= whole for own, whole in zip(stated, most, strict=False)):
            yield f"engine {engine.id}: {name} {list(stated)[:80]}; expected 1 to {most[:80]}"


def _encoder_problems(encoder: EncoderEntry, entry: GenerationEntry) -> Iterable[str]:
    if encoder.start_id >= entry.vocabulary:
        yield f"generation: start_id {encoder.start_id}; expected a number below the vocabulary of {entry.vocabulary}"
    if sorted(engine.submodel for engine in encoder.engines) != sorted({engine.submodel for engine in entry.engines}):
        yield "generation: expected an encoder for each submodel that generates, and no other"
    if len(entry.source_layers) != len(entry.layers):
        yield f"generation: an encoder for {len(entry.source_layers)} layers; expected {len(entry.layers)}"
    for layer in entry.source_layers:
        if layer.heads * layer.size * encoder.positions > MAX_ELEMENTS:
            yield f"generation: an encoder returns more than {MAX_ELEMENTS} numbers at {encoder.positions} positions"
    for engine in encoder.engines:
        yield from _kept_problems(engine, entry)
        if engine.segment != ENCODER:
            yield f"engine {engine.id}: segment {engine.segment!r}; engines that read a prompt have {ENCODER!r}"
        if engine.bucket.batch != 1 or engine.bucket.smallest.tokens != 1:
            yield f"engine {engine.id}: bucket {engine.bucket}; expected one row that begins with 1 token"
        if engine.bucket.sequence != encoder.positions:
            yield f"engine {engine.id}: takes {engine.bucket.sequence} tokens; expected {encoder.positions}"
        if any(engine.backend != other.backend for other in entry.engines):
            yield f"engine {engine.id}: backend {engine.backend}; expected that of the engines which read what it makes"
        if engine.weight_bytes is None:
            yield f"engine {engine.id}: an engine that generates without weight_bytes"
