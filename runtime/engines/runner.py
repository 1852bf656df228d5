"""Interface of a back end to the runtime: one protocol, and the door that opens an engine with the right one; and the
open engines of one model: each is opened once, by the first request that needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Protocol, cast, runtime_checkable

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.open_bundle import Bundle
from ...errors import BundleError, BundleIncompatibleError
from ...ownership import Owner
from ...profiles.backends import BACKENDS
from ...profiles.precision import PRECISIONS
from ..device.device import Device, DeviceArray, DeviceCall
from ..graphs.task_tensors import TaskTensors
from ..inputs.arrays import Array
from .memory import MemoryCap
from .onnxruntime_gpu.provider import Provider
from .residency import Residency


class Runner(Protocol):
    """One engine on one backend. Entering it opens the engine; using it while inactive is an error."""

    def __enter__(self) -> Runner: ...

    def __exit__(self, *_: object) -> None: ...

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:
        """Outputs in the order of ``Manifest.interface_of``, owned by the caller; with ``routing`` the engine's behind
        them, in the order of its entry.

        ``feeds`` has every input of it at the bucket's shape, or one in its range, in the stated dtype. Thread-safe.
        """
        ...

    def bind(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """A call that runs from ``feeds`` into ``outputs``, as often as it is made, without copying either.

        The arrays have one shape of the engine's, are C-contiguous and stay the caller's; an output without one is not
        fetched. One thread at a time may make the call. Raises InputError for an array that does not fit, BundleError
        while inactive; the call too.
        """
        ...


@runtime_checkable
class TakesTasks(Protocol):
    """A runner whose engine takes the tensors of a task as inputs; by itself it has the base's."""

    def for_task(self, task: TaskTensors) -> Runner:
        """The same engine, open as long as this runner is, with the tensors of ``task``."""
        ...


class DeviceRunner(Runner, Protocol):
    """A runner whose engine can read and write arrays that stay on its device."""

    @property
    def device(self) -> Device:
        """Where it runs. Raises BundleError while inactive."""
        ...

    def bind_device(self, feeds: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]) -> DeviceCall:
        """A call that queues a run from ``feeds`` into ``outputs`` on the device, and waits for nothing.

        The arrays stay where they are until the call is closed, by who requested it or with the runner; an output
        without one is not kept. The engine may run once while it is bound, so ``feeds`` hold valid values by then. One
        thread at a time may make the call. Raises as ``bind`` does.
        """
        ...


@runtime_checkable
class CacheRunner(Protocol):
    """A runner of an engine that generates, and keeps what it made of tokens on its device; it has no runs on arrays of
    the host alone."""

    def bind_cache(
        self, feeds: Mapping[str, Array], outputs: Mapping[str, Array], caches: Mapping[str, DeviceArray]
    ) -> DeviceCall:
        """A call that runs from ``feeds`` into ``outputs``, arrays of the host, and returns once they are written; an
        output without one is not fetched.

        ``caches`` lie on the device: by the names of inputs, those that the engine updates in place, and what an
        encoder makes, and a decoder reads, of prompts. Arrays have one shape of the engine's, stay where they are until
        the call is closed, by who requested it or with the runner, and are the caller's. Nothing runs while it is
        bound. One thread at a time may make the call. Raises as ``bind`` does.
        """
        ...


class Opener(Protocol):
    """Interface of the module that a back end names as its ``opener``; importing it imports nothing of the back end."""

    take_device: Callable[[], Device] | None
    """Opens the device on which runners are DeviceRunners; None where engines run on the processor."""

    def problem(self, precisions: Collection[str] = ()) -> str | None:
        """Why no engine, or none in one of ``precisions``, can run on this host, in one line, or None."""
        ...

    def open_runner(
        self, bundle: Bundle, engine: EngineEntry, residency: Residency, threads: int, affinity: Sequence[int]
    ) -> Runner:
        """An inactive runner of ``engine``. Raises BundleIncompatibleError where this host cannot run it."""
        ...

    def described(self) -> str:
        """Device that it runs on here, for people. Raises BundleError where there is none of it."""
        ...


@cache
def opener(backend: str) -> Opener:
    """The opener of the back end of this name."""
    package = __name__.rpartition(".runtime.")[0]
    return cast(Opener, import_module(f"{package}.{BACKENDS[backend].opener}"))


def device_source(engine: EngineEntry, provider: Provider | None) -> Callable[[], Device] | None:
    """Opens the device on which ``engine``'s runner is a DeviceRunner, or None where it runs on the processor."""
    if provider is not None:
        return provider.take
    return opener(engine.backend).take_device


def runnable_engines(bundle: Bundle, provider: Provider | None = None) -> tuple[EngineEntry, ...]:
    """The engines that this host has a backend for; with a ``provider`` those whose graphs have kernels on a GPU.

    Raises BundleIncompatibleError if there is none.
    """
    if provider is not None:
        return _graphs_for_gpus(bundle, provider)
    needed = {engine.backend for engine in bundle.manifest.engines}
    problems = {backend: opener(backend).problem() for backend in sorted(needed)}
    engines = tuple(engine for engine in bundle.manifest.engines if problems[engine.backend] is None)
    if not engines:
        missing = "; ".join(filter(None, problems.values()))
        raise BundleIncompatibleError(f"bundle {bundle.path}: this host cannot run its engines: {missing}")
    return engines


def _graphs_for_gpus(bundle: Bundle, provider: Provider) -> tuple[EngineEntry, ...]:
    """Integers for ONNX Runtime are in its processor's own operators; those for TensorRT are standard ones. Segments
    hand on memory of the GPU, which is bound to one shape: a chain with a range has none of them."""
    segments = [one for one in bundle.manifest.engines if one.segment is not None]
    chains = all(one.bucket.is_static for one in segments)
    everything = [one for one in bundle.manifest.engines if chains or one.segment is None]
    engines = tuple(
        one for one in everything if not (BACKENDS[one.backend].own_operators and PRECISIONS[one.precision].is_integer)
    )
    if not engines:
        found = ", ".join(sorted({engine.precision for engine in everything}))
        raise BundleIncompatibleError(
            f"bundle {bundle.path}: provider {provider.name} runs none of its engines, whose kernels for {found} are a "
            "processor's; use provider cpu, or compile it with fp32 or fp16"
        )
    return engines


def runner_for(
    bundle: Bundle,
    engine: EngineEntry,
    residency: Residency,
    threads: int,
    provider: Provider | None = None,
    affinity: Sequence[int] = (),
) -> Runner:
    """An inactive runner for one engine: its graph in ONNX Runtime on ``provider``, else as its backend says, on
    ``threads`` cores, placed by ``affinity``; on a GPU these and ``residency`` mean nothing.

    Raises BundleIncompatibleError where its back end is missing.
    """
    if provider is not None and engine.kind.needs == "generation":
        from .onnxruntime_gpu.cached_runner import OnnxRuntimeGpuCacheRunner

        return OnnxRuntimeGpuCacheRunner(bundle, engine, provider, threads)
    if provider is not None:
        from .onnxruntime_gpu.runner import OnnxRuntimeGpuRunner

        return OnnxRuntimeGpuRunner(bundle, engine, provider)
    return opener(engine.backend).open_runner(bundle, engine, residency, threads, affinity)


class EnginePool:
    """Opens engines on demand and closes them all together; engines of one file are one. Thread-safe.

    With a ``provider`` their graphs run in ONNX Runtime on it, else each engine runs on its backend. Open engines count
    under the ``memory`` cap, if there is one.
    """

    def __init__(
        self,
        bundle: Bundle,
        residencies: Mapping[str, Residency],
        threads: int,
        provider: Provider | None = None,
        affinity: Sequence[int] = (),
        memory: MemoryCap | None = None,
    ) -> None:
        self.bundle = bundle
        self._memory = memory
        self._provider = provider
        self.on_gpu = provider is not None
        self.residencies = residencies
        self.threads = threads
        self._affinity = affinity
        self._open: dict[str, Runner] = {}
        # By file; the owner has what is counted under the cap.
        self._opened_as: dict[str, tuple[EngineEntry, Residency, Owner]] = {}
        self._ran: set[str] = set()
        self._locks = {engine.file: threading.Lock() for engine in bundle.manifest.every_engine}
        self._closed = False

    def get(self, engine: EngineEntry) -> Runner:
        """The open runner of ``engine``. Raises BundleError once the pool is closed, or if it cannot be opened,
        SelectionError if that exceeds the memory cap."""
        runner = self._open.get(engine.file)
        if runner is not None:
            return runner
        with self._locks[engine.file]:
            if self._closed:
                raise BundleError(f"bundle {self.bundle.path}: the model is closed; use it inside its `with` block")
            if engine.file not in self._open:
                self._open[engine.file] = self._opened(engine)
            return self._open[engine.file]

    def of_task(self, engine: EngineEntry, task: TaskTensors | None) -> Runner:
        """The open runner of ``engine`` with the tensors of ``task`` in place of the base's, None for those. Raises as
        ``get``."""
        runner = self.get(engine)
        if task is None or self.bundle.merged is not None:  # a merged one's are in the weights
            return runner
        assert isinstance(runner, TakesTasks)  # a manifest states tasks of no other backend
        return runner.for_task(task)

    def is_open(self, engine: EngineEntry) -> bool:
        """Whether a request has opened ``engine``."""
        return engine.file in self._open

    def runs_first(self, engine: EngineEntry) -> bool:
        """Whether ``engine``, which has run now, had not before since it was opened."""
        if engine.file in self._ran:
            return False
        self._ran.add(engine.file)
        return True

    @property
    def held(self) -> list[tuple[EngineEntry, Residency]]:
        """The open engines, and how each holds its weights."""
        return [(engine, residency) for engine, residency, _ in self._opened_as.values()]

    def reassign(self, residencies: Mapping[str, Residency]) -> None:
        """Holds engines as ``residencies`` say from now on, where no run is under way. One that is open is closed where
        it must give memory back, and stays as it is otherwise."""
        decided = dict(residencies)
        for engine, residency in self.held:
            if engine.id in decided and residency == "shared":
                decided[engine.id] = residency
            elif decided.get(engine.id) != residency:
                with self._locks[engine.file]:
                    self._close(engine.file)
        self.residencies = decided

    def runnable(self) -> tuple[EngineEntry, ...]:
        """The bundle's engines that can run here. Raises BundleIncompatibleError if there is none."""
        return runnable_engines(self.bundle, self._provider)

    def device_source(self, engine: EngineEntry) -> Callable[[], Device] | None:
        """Opens the device on which ``engine``'s runner is a DeviceRunner, or None where it runs on the processor."""
        return device_source(engine, self._provider)

    def close(self) -> None:
        """Closes every engine; runs that are under way finish first or fail with BundleError."""
        self._closed = True
        for file, lock in self._locks.items():
            with lock:
                self._close(file)

    def _close(self, file: str) -> None:
        runner = self._open.pop(file, None)
        self._ran.discard(file)
        if runner is not None:
            runner.__exit__(None, None, None)
        self._opened_as.pop(file, None)

    def _opened(self, engine: EngineEntry) -> Runner:
        residency, owner = self.residencies[engine.id], Owner()
        runner = runner_for(self.bundle, engine, residency, self.threads, self._provider, self._affinity)
        try:
            if self._memory is not None:
                self._memory.open(owner, engine, residency)
            opened = runner.__enter__()
        except BaseException:
            owner.is_over = True
            raise
        self._opened_as[engine.file] = engine, residency, owner
        return opened
