"""A GPU as ONNX Runtime's sessions see it, played on the processor: nothing here ran on one.

A graph does again what was captured, with the arrays that it was captured with, whoever starts it.
"""

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
from nestforge.errors import BundleError, BundleIncompatibleError
from nestforge.runtime.device.cuda_device import DeviceThread
from nestforge.runtime.device.device import ALIGNMENT, Device, DeviceArray, DeviceGraph
from nestforge.runtime.device.store import DeviceView
from nestforge.runtime.engines.onnxruntime_gpu import session
from nestforge.runtime.engines.onnxruntime_gpu.provider import PROVIDERS, Provider
from nestforge.runtime.engines.onnxruntime_gpu.session import GpuSession
from nestforge.runtime.inputs.arrays import Array

T = TypeVar("T")


class HostDevice:
    """The processor in the place of a GPU: everything is done when it is requested. See ``Device``."""

    kind = "cpu"
    index = 0

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._memory: dict[int, Array] = {}

    @property
    def allocated_bytes(self) -> int:
        """Memory that ``allocate`` handed out and ``free`` did not take back."""
        return sum(block.nbytes - ALIGNMENT for block in self._memory.values())

    def allocate(self, size: int) -> int:
        room = np.empty(size + ALIGNMENT, np.uint8)
        address = room.ctypes.data + -room.ctypes.data % ALIGNMENT
        self._memory[address] = room
        return address

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def free(self, address: int) -> None:
        del self._memory[address]

    def staging(self, size: int) -> Array:
        return np.empty(size, np.uint8)

    def free_staging(self, staging: Array) -> None: ...

    def to_device(self, address: int, source: Array) -> None:
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def to_host(self, target: Array, address: int) -> None:
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def copy_rows(self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * source_pitch, width)

    def clear_rows(self, target: int, pitch: int, width: int, rows: int) -> None:
        for row in range(rows):
            ctypes.memset(target + row * pitch, 0, width)

    def wait(self) -> None: ...

    def perform(self, work: Callable[[], T]) -> T:
        return work()

    def capture(self, work: Callable[[], object]) -> DeviceGraph:
        return PlayedGraph(self, work)

    def start(self, graph: DeviceGraph) -> None:
        graph.launch()

    def release(self) -> None: ...


class PlayedGraph:
    """Does ``work`` again whenever it is started, until it is closed."""

    def __init__(self, device: HostDevice, work: Callable[[], object]) -> None:
        self._device: HostDevice | None = device
        self._work = work

    def launch(self) -> None:
        self._device.perform(self._work)

    def close(self) -> None:
        self._device = None

    @property
    def is_closed(self) -> bool:
        return self._device is None


class Gpu(HostDevice):
    """The processor's memory, under the name of a GPU, with the thread that a GPU has. ``refuses`` is why it captures
    nothing, ``graphs`` are what it captured, and ``starts`` counts how often these were started."""

    kind = "cuda"
    stream = SimpleNamespace(handle=4711)
    refuses = ""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[PlayedGraph] = []
        self.starts = 0
        self.thread = DeviceThread(lambda: None)

    def perform(self, work: Callable[[], T]) -> T:
        with self.lock:
            return self.thread.perform(work)

    def capture(self, work: Callable[[], object]) -> DeviceGraph:
        if self.refuses:
            raise BundleError(self.refuses)
        self.graphs.append(PlayedGraph(self, work))
        return self.graphs[-1]

    def start(self, graph: DeviceGraph) -> None:
        self.starts += 1
        graph.launch()


def provider_on(gpu: Gpu, name: str = "cuda") -> Provider:
    """ONNX Runtime's provider ``name``, options and all, on ``gpu``."""
    return replace(PROVIDERS[name], take=lambda: gpu)


class PlayedSession(GpuSession):
    """A session of the processor's. ``opened`` has the options of every one; ``refuses`` says where it fails, see the
    tests; ``threads`` are those that queued its runs. Its outputs in float32 are larger by the share ``off_by``."""

    refuses = ""
    off_by = 0.0
    opened: list[dict[str, str]]

    def __init__(
        self,
        path: Path,
        provider: Provider,
        gpu: Gpu,
        views: Mapping[str, DeviceView],
        options: list[dict[str, str]],
        is_range: bool = False,
    ) -> None:
        self.opened.append(options[0])
        self.threads: set[int] = set()
        if self.refuses == "memory":
            raise BundleIncompatibleError(f"{path}: CUDA failure 2: out of memory")
        on_host = {name: replace(view, kind="cpu") for name, view in views.items()}
        super().__init__(path, host_provider(), HostDevice(), on_host, [{}], is_range)
        self._gpu = gpu

    def run(self, binding: Any, options: Any) -> None:
        self._gpu.perform(lambda: self.queue(binding, options))

    def queue(self, binding: Any, options: Any) -> None:
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        self.threads.add(threading.get_ident())
        if self.refuses == "memory in the first run":
            raise RuntimeError("Failed to allocate memory for requested buffer of size 99")
        super().queue(binding, options)
        for output in binding.get_outputs() if self.off_by else ():
            if output.element_type() == 1:  # float32
                output.numpy()[...] *= np.float32(1 + self.off_by)


def played_sessions(monkeypatch: pytest.MonkeyPatch, refuses: str = "", off_by: float = 0.0) -> type[PlayedSession]:
    """The class of all sessions from here on."""
    played = type("Session", (PlayedSession,), {"refuses": refuses, "off_by": off_by, "opened": []})
    monkeypatch.setattr(session, "GpuSession", played)
    return played


def arrays_on(device: Device, feeds: Mapping[str, Array]) -> dict[str, DeviceArray]:
    """A copy of every array in the memory of ``device``, for the caller to free."""
    arrays = {}
    for name, array in feeds.items():
        arrays[name] = DeviceArray(device.allocate(array.nbytes), str(array.dtype), array.shape)
        device.to_device(arrays[name].address, array)
    return arrays


def host_provider(device: HostDevice | None = None) -> Provider:
    """ONNX Runtime's kernels for the processor, with weights as views of a store in ``device``'s memory."""
    here = device or HostDevice()
    return Provider("host", ("CPUExecutionProvider",), True, False, lambda: here, lambda *_: [{}])
