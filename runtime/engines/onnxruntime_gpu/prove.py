"""An engine that generates, on a GPU against the processor, when it is opened.

The gate of a compile runs every graph in ONNX Runtime on a processor, and a plan of TensorRT is compared with its graph
when it is built. ONNX Runtime's kernels for a GPU meet an engine for the first time where it is opened, and have been
seen to answer otherwise (docs/gpu.md): so some tokens are read in a chunk, and one in a step that starts as a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from ....bucket import Bucket
from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.entries.generation_entry import LOGIT_COUNT, PAST, POSITIONS, PRESENT, SOURCE, SOURCE_LENGTHS
from ....bundle.entries.tensor_spec import TensorSpec
from ....bundle.open_bundle import Bundle
from ....errors import BundleIncompatibleError
from ...device.cached_layout import CachedLayouts
from ...device.device import Device, DeviceArray
from ...inputs.arrays import Array
from .session import CALL_BY_CALL, on_the_processor

# Tokens of the chunk, and of the prompt that an encoder has read.
_CHUNK, _PROMPT = 24, 16
# Share of the largest answer. float32 in another order was off by 1e-6 of it, TF32 would be by 1e-3.
_LIMIT = 2e-4


class Call(Protocol):
    """See ``DeviceCall``."""

    def __call__(self) -> None: ...

    def close(self) -> None: ...


# As ``CacheRunner.bind_cache``.
Bind = Callable[[Mapping[str, Array], Mapping[str, Array], Mapping[str, DeviceArray]], Call]


def require_equal(bundle: Bundle, engine: EngineEntry, bind: Bind, device: Device) -> None:
    """Raises BundleIncompatibleError where the runs of ``engine`` that ``bind`` makes on ``device`` answer otherwise
    than the processor."""
    layouts, rng = CachedLayouts(bundle, engine), np.random.default_rng(0)
    inputs, _ = layouts.interface
    room = min([_CHUNK, engine.bucket.sequence, *([] if engine.capacity is None else [engine.capacity - 1])])
    sizes = {LOGIT_COUNT: 1, SOURCE: _PROMPT}
    known = on_the_processor(bundle, engine)
    kept = {
        spec.name: _numbers(spec, spec.shape(Bucket(1, room), sizes), rng)
        for spec in inputs
        if spec not in layouts.inputs
    }
    placed: dict[str, DeviceArray] = {}
    try:
        for spec in layouts.on_device:
            shape = spec.shape(Bucket(1, room), sizes)
            array = kept.get(spec.name, np.zeros(shape, np.float32))
            placed[spec.name] = DeviceArray(device.allocate(array.nbytes), "float32", shape)
            device.to_device(placed[spec.name].address, array)
        device.wait()
        rounds = ((0, room, 1), (room, 1, CALL_BY_CALL + 2)) if engine.capacity else ((0, room, 1),)
        for start, count, times in rounds:
            feeds = {spec.name: _feed(spec, start, count, rng) for spec in layouts.inputs}
            expected = known({**feeds, **kept})
            found = {spec.name: np.empty(spec.shape(Bucket(1, count), sizes), np.float32) for spec in layouts.outputs}
            call = bind(feeds, found, placed)
            try:
                for _ in range(times):  # again at the same place, so that what it keeps is the same
                    call()
            finally:
                call.close()
            made = {name: PAST + name.removeprefix(PRESENT) for name in expected if name not in found}
            found |= {
                name: _fetched(device, placed[there if there in placed else name]) for name, there in made.items()
            }
            _compare(engine, found, expected, "a step as a CUDA graph" if times > 1 else "a chunk")
            kept |= {there: expected[name] for name, there in made.items()}
    finally:
        for array_there in placed.values():
            device.free(array_there.address)


def _compare(engine: EngineEntry, found: Mapping[str, Array], expected: Mapping[str, Array], what: str) -> None:
    for name, array in found.items():
        off, largest = float(np.abs(array - expected[name]).max()), float(np.abs(expected[name]).max())
        if not off <= _LIMIT * largest:
            raise BundleIncompatibleError(
                f"engine {engine.id}: on this GPU {name} of {what} is off by {off:.2g} from the processor's, of "
                f"{largest:.2g} at most; expected {_LIMIT:g} of that; use provider cpu"
            )


def _feed(spec: TensorSpec, start: int, count: int, rng: np.random.Generator) -> Array:
    """What the ``count`` tokens from place ``start`` on are read with."""
    if spec.name == POSITIONS:
        return np.arange(start, start + count, dtype=np.int64)[None]
    if spec.high is not None:
        return rng.integers(0, spec.high, (1, count))
    if spec.name == SOURCE_LENGTHS:
        return np.array([_PROMPT], np.int64)
    return np.array(
        [count - 1 if LOGIT_COUNT in spec.dims else start], np.int64
    )  # the last token, or the first's place


def _numbers(spec: TensorSpec, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Nothing in a cache, and anything of a prompt."""
    empty = spec.name.startswith(PAST)
    return np.zeros(shape, np.float32) if empty else rng.standard_normal(shape).astype(np.float32)


def _fetched(device: Device, array: DeviceArray) -> Array:
    found = np.empty(array.shape, np.float32)
    device.to_host(found, array.address)
    device.wait()
    return found
