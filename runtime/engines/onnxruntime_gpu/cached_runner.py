"""Engines that generate, in ONNX Runtime on a device: what they keep of tokens stays there, in memory of the caller's.

The graphs are those for TensorRT, whose caches have one capacity: a cache is input and output of a session at one
address, so that a run copies new tokens over and logits back. Steps, which repeat, start as one CUDA graph.

The gate of a compile runs every graph in ONNX Runtime on a processor, and a plan of TensorRT is compared with its graph
when it is built. ONNX Runtime's kernels for a GPU meet an engine for the first time where it is opened, and have been
seen to answer otherwise (docs/gpu.md): so some tokens are read in a chunk behind a cache that is nearly full, where
windows hide what came first, and the last one in a step that starts as a graph. Whole texts are compared by
``nestforge verify --provider``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import numpy as np
import onnxruntime

from ....bucket import Bucket
from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.entries.generation_entry import LOGIT_COUNT, PAST, POSITIONS, PRESENT, SOURCE, SOURCE_LENGTHS
from ....bundle.entries.tensor_spec import TensorSpec
from ....bundle.open_bundle import Bundle
from ....errors import BundleIncompatibleError
from ....outside import library_errors
from ...device.cached_layout import Bind, CachedLayouts, CachedRun, CachedRunner, HostRun
from ...device.device import Device, DeviceArray
from ...inputs.arrays import Array
from ..onnxruntime.session import open_session, session_options
from .provider import Provider
from .session import CALL_BY_CALL, BoundRun, GpuSession, OpenEngine

# Tokens of the chunk, room for those that an encoder has read, and how many of these count.
_CHUNK, _PROMPT, _READ = 24, 16, 11
# Share of what answers usually are. float32 in another order was off by some 1e-6 of it, TF32 would be by 1e-3 on
# average and several times that at most.
_LIMIT = 1e-3
# Graphs and weights that were compared, by device, for as long as that is open.
_proven: WeakKeyDictionary[Device, set[tuple[str, str]]] = WeakKeyDictionary()


def require_equal(bundle: Bundle, engine: EngineEntry, bind: Bind, device: Device, threads: int) -> None:
    """Raises BundleIncompatibleError where the runs of ``engine`` that ``bind`` makes on ``device`` answer otherwise
    than the processor, on ``threads`` cores. Takes the host a session of the graph, and a cache of one row twice."""
    files = {entry.path: entry.sha256 for entry in bundle.manifest.files}
    key, proven = (files[engine.file], bundle.manifest.weights_sha256 or ""), _proven.setdefault(device, set())
    if key in proven:
        return
    layouts, rng = CachedLayouts(bundle, engine), np.random.default_rng(0)
    chunk = min(_CHUNK, engine.bucket.sequence, (engine.capacity or _CHUNK + 1) - 1)
    start = 0 if engine.capacity is None else engine.capacity - 1 - chunk
    sizes = {LOGIT_COUNT: 1, SOURCE: _PROMPT}
    read, made = (
        {spec.name: spec.shape(Bucket(1, chunk), sizes) for spec in specs} for specs in (layouts.read, layouts.made)
    )
    kept = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in read.items()}
    path = bundle.file(engine.file)
    with bundle.held(engine.file, *bundle.manifest.weight_names):
        options = session_options(threads, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL, packed=False)
        session = open_session(path, options)
    answered = [spec.name for spec in layouts.outputs if spec.dtype == "float32"]
    updated = {PRESENT + name.removeprefix(PAST): name for name in read if name.startswith(PAST)}
    names = [*answered, *updated, *made]
    placed: dict[str, DeviceArray] = {}
    try:
        for name, shape in {**read, **made}.items():
            placed[name] = DeviceArray(device.allocate(4 * int(np.prod(shape))), "float32", shape)
        for name, array in kept.items():
            device.to_device(placed[name].address, array)
        device.wait()
        steps = ((start, chunk, 1), *(((start + chunk, 1, CALL_BY_CALL + 2),) if engine.capacity else ()))
        for place, count, times in steps:
            feeds = {spec.name: _feed(spec, place, count, rng) for spec in layouts.inputs}
            with library_errors(lambda said: BundleIncompatibleError(f"{path}: on the processor: {said}")):
                expected = dict(zip(names, session.run(names, {**feeds, **kept}), strict=True))
            found = {name: np.empty_like(expected[name]) for name in answered}
            call = bind(feeds, found, placed)
            try:
                for _ in range(times):  # again at the same place, so that what it keeps is the same
                    call()
            finally:
                call.close()
            found |= {name: _fetched(device, placed[updated.get(name, name)]) for name in (*updated, *made)}
            _compare(engine, found, expected, "a step as a CUDA graph" if times > 1 else "a chunk")
            kept |= {past: expected[name] for name, past in updated.items()}
    finally:
        for there in placed.values():
            device.free(there.address)
    proven.add(key)


def _compare(engine: EngineEntry, found: Mapping[str, Array], expected: Mapping[str, Array], what: str) -> None:
    for name, array in found.items():
        known = expected[name]
        counts = np.isfinite(known)
        usual = float(np.sqrt(np.mean(known[counts] ** 2))) if counts.any() else 0.0
        off = float(np.abs(array[counts] - known[counts]).max(initial=0.0))
        if not off <= _LIMIT * usual or not np.array_equal(array[~counts], known[~counts], equal_nan=True):
            raise BundleIncompatibleError(
                f"engine {engine.id}: on this GPU {name} of {what} is off by {off:.2g} from the processor's, whose rms "
                f"is {usual:.2g}; expected at most {_LIMIT:g} of that; use provider cpu"
            )


def _feed(spec: TensorSpec, start: int, count: int, rng: np.random.Generator) -> Array:
    """Inputs with which the ``count`` tokens from place ``start`` on are read."""
    if spec.name == POSITIONS:
        return np.arange(start, start + count, dtype=np.int64)[None]
    if spec.high is not None:
        return rng.integers(0, spec.high, (1, count))
    if spec.name == SOURCE_LENGTHS:
        return np.array([_READ], np.int64)
    # Which token is answered, the last one, or the place of the first.
    return np.array([count - 1 if LOGIT_COUNT in spec.dims else start], np.int64)


def _fetched(device: Device, array: DeviceArray) -> Array:
    found = np.empty(array.shape, np.float32)
    device.to_host(found, array.address)
    device.wait()
    return found


class OnnxRuntimeGpuCacheRunner(CachedRunner):
    """One engine as one session on ``provider``'s device; see ``CacheRunner``."""

    def __init__(self, bundle: Bundle, engine: EngineEntry, provider: Provider, threads: int) -> None:
        """``threads`` of the processor compare it."""
        super().__init__(bundle, engine)
        self._provider, self._threads = provider, threads
        self._opened: OpenEngine | None = None

    def __enter__(self) -> OnnxRuntimeGpuCacheRunner:
        """Opens the session, and compares it with the processor. Raises BundleCorruptError or
        BundleIncompatibleError."""
        self._device = device = self._provider.take()
        try:
            with device.lock:
                self._opened = OpenEngine(self._bundle, self.engine, self._provider, device)
            require_equal(self._bundle, self.engine, self.bind_cache, device, self._threads)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _bind(self, bound: CachedRun, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> GpuCacheRun:
        if self._opened is None:
            raise self._not_open()
        session, captures = self._opened.session, self._provider.captures
        return GpuCacheRun(self._where, self.device, session, bound, feeds, outputs, captures, self._runs.discard)

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


class GpuCacheRun(HostRun):
    """A run of a session, whose kernels start as one CUDA graph between the copies."""

    def __init__(
        self,
        where: str,
        device: Device,
        session: GpuSession,
        bound: CachedRun,
        feeds: Mapping[str, Array],
        outputs: Mapping[str, Array],
        captures: bool,
        forget: Callable[[HostRun], None],
    ) -> None:
        self._session, self._captures = session, captures
        super().__init__(where, device, bound, feeds, outputs, forget)

    def _place(self, bound: CachedRun) -> None:
        inputs, made = (
            {name: DeviceArray(self._block + slot.offset, slot.dtype, slot.shape) for name, slot in slots.items()}
            for slots in (self._layout.inputs, self._layout.outputs)
        )
        session = self._session
        binding = session.binding({**inputs, **bound.read}.items(), {**made, **bound.written}.items())
        self._run = BoundRun(self._where, self._device, session, binding, self._captures, lambda _: None)

    @property
    def is_captured(self) -> bool:
        return self._run.is_captured

    def _queue(self) -> None:
        device, slots = self._device, self._layout.outputs
        device.to_device(self._block, self._staging[: self._layout.input_bytes])
        self._run()
        for name in self._outputs:
            device.to_host(slots[name].host_view(self._staging), self._block + slots[name].offset)

    def _release(self) -> None:
        self._run.close()
