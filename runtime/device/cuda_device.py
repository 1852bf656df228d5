"""A GPU as a ``Device``: one stream, in which all engines of the process that share the device queue their work.

So the segments of a chain follow each other without waiting, and what one engine needs for its activations another may
use after it. ONNX Runtime's sessions are given this stream, and TensorRT's bound runs start in it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

from ...errors import BundleError
from ..inputs.arrays import Array
from .cuda_memory import Graph, Stream, allocate, device_name, free, free_bytes, free_pinned, pinned, use_device
from .device import DeviceGraph, SharedValues

T = TypeVar("T")


class DeviceThread:
    """Does what it is handed, in order, while whoever hands it over waits."""

    def __init__(self, begin: Callable[[], None]) -> None:
        """``begin`` is the first thing that the thread does, here and after ``renew``; what it raises is raised."""
        self._begin = begin
        self._start()

    def perform(self, work: Callable[[], T]) -> T:
        """Result or error of ``work``. It performs nothing itself, and takes no lock that the caller holds."""
        done = self._executor.submit(work)
        try:
            return done.result()
        finally:
            while not done.done():  # the caller was interrupted, but the work still reads what is the caller's
                with suppress(KeyboardInterrupt):
                    wait((done,))
            del done  # a failure holds this frame, and the frame would hold the failure

    def renew(self) -> None:
        """Goes on in a new thread, which has none of the errors that CUDA keeps for each."""
        self.close()
        self._start()

    def close(self) -> None:
        """Ends the thread."""
        self._executor.shutdown()

    def _start(self) -> None:
        self._executor = ThreadPoolExecutor(1, "nestforge-device")
        try:
            self._executor.submit(self._begin).result()
        except BaseException:
            self.close()
            raise


class CudaDevice:
    """See ``Device``. Made by ``take_cuda_device``."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        """Raises BundleError where there is no such GPU."""
        use_device(index)
        self.index = index
        self.lock = threading.RLock()
        self.name, capability = device_name(index)
        major, minor = capability.split(".")
        self.capability = int(major), int(minor)
        self.stream = Stream()
        self._thread = DeviceThread(lambda: use_device(index))

    def allocate(self, size: int) -> int:
        with self.lock:
            use_device(self.index)
            return allocate(size)

    def free_bytes(self) -> int:
        use_device(self.index)
        return free_bytes()

    def free(self, address: int) -> None:
        with self.lock:
            use_device(self.index)
            self.stream.wait()
            free(address)

    def staging(self, size: int) -> Array:
        """See ``Device.staging``: page-locked."""
        with self.lock:
            use_device(self.index)
            return pinned(size)

    def free_staging(self, staging: Array) -> None:
        with self.lock:
            free_pinned(staging)

    def to_device(self, address: int, source: Array) -> None:
        with self.lock:
            use_device(self.index)
            self.stream.to_device(address, source)

    def to_host(self, target: Array, address: int) -> None:
        with self.lock:
            use_device(self.index)
            self.stream.to_host(target, address)

    def copy_rows(self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        with self.lock:
            use_device(self.index)
            self.stream.copy_rows(target, pitch, source, source_pitch, width, rows)

    def clear_rows(self, target: int, pitch: int, width: int, rows: int) -> None:
        with self.lock:
            use_device(self.index)
            self.stream.clear_rows(target, pitch, width, rows)

    def wait(self) -> None:
        with self.lock:  # to wait for a stream while another thread captures in it breaks the capture
            use_device(self.index)
            self.stream.wait()

    def perform(self, work: Callable[[], T]) -> T:
        with self.lock:
            return self._thread.perform(work)

    def capture(self, work: Callable[[], object]) -> Graph:
        """See ``Device.capture``.

        CUDA takes the end of a capture from the thread that began it alone. And it keeps the last error of every thread
        in each copy of its runtime, and ONNX Runtime has one of its own: so another thread goes on after a failure.
        """
        with self.lock:
            try:
                return self._thread.perform(lambda: self.stream.capture(work))
            except BundleError:
                self._thread.renew()
                raise

    def start(self, graph: DeviceGraph) -> None:
        with self.lock:
            use_device(self.index)
            graph.launch()

    def release(self) -> None:
        _devices.give(self.index)

    def close(self) -> None:
        """Called by the last ``release``."""
        self._thread.close()
        self.stream.close()


_devices: SharedValues[int, CudaDevice] = SharedValues()


def take_cuda_device(index: int = 0) -> CudaDevice:
    """The device that all engines on this GPU share; every use ends with ``release``.

    Raises BundleError where there is no such GPU.
    """
    return _devices.take(index, lambda: CudaDevice(index))
