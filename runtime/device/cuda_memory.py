"""The few calls of CUDA's runtime that an engine needs: a stream, memory on both sides, and a graph of one run.

Every call is checked, and its failure is one line. Nothing is released by garbage collection: who opens, closes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import runtime as cudart

from ...errors import BundleError, BundleIncompatibleError
from ...outside import is_of_library, said_by
from ..inputs.arrays import Array


def checked(what: str, result: tuple[Any, ...]) -> Any:
    """The value that a call returned beside its error code, if any.

    Raises BundleIncompatibleError where the device has too little memory, BundleError for any other failure.
    """
    error, *values = result
    if error == cudart.cudaError_t.cudaSuccess:
        return values[0] if values else None
    text = cudart.cudaGetErrorString(error)[1]
    reason = text.decode() if isinstance(text, bytes) else str(text)
    if error == cudart.cudaError_t.cudaErrorMemoryAllocation:
        raise BundleIncompatibleError(
            f"CUDA: {what}: {reason}; close other programs on this GPU, or open fewer engines"
        )
    raise BundleError(f"CUDA: {what}: {reason}")


def use_device(device: int) -> None:
    """Makes ``device`` the calling thread's: CUDA keeps that choice per thread."""
    checked("choosing the GPU", cudart.cudaSetDevice(device))


def device_name(device: int) -> tuple[str, str]:
    """Name and compute capability, such as ``8.7``."""
    facts = checked("asking for the GPU", cudart.cudaGetDeviceProperties(device))
    name = facts.name.decode() if isinstance(facts.name, bytes) else str(facts.name)
    return name.rstrip("\0"), f"{facts.major}.{facts.minor}"


def free_bytes() -> int:
    """Free memory of the calling thread's GPU."""
    error, free, _total = cudart.cudaMemGetInfo()
    checked("asking for free memory", (error,))
    return int(free)


def allocate(size: int) -> int:
    """The address of ``size`` bytes on the calling thread's GPU; none has the address 0."""
    return int(checked(f"allocating {size} bytes", cudart.cudaMalloc(max(1, size))))


def free(address: int) -> None:
    """Gives back what ``allocate`` returned, once no queued work uses it."""
    cudart.cudaFree(address)


def pinned(size: int) -> Array:
    """``size`` bytes of page-locked host memory; ``free_pinned`` gives them back."""
    return np.asarray(_PinnedMemory(max(1, size)))[:size]


def free_pinned(memory: Array) -> None:
    """Gives back what ``pinned`` returned; no view of it may be used afterwards."""
    cudart.cudaFreeHost(int(memory.ctypes.data))


class _PinnedMemory:
    """Page-locked host memory, as numpy reads it."""

    def __init__(self, size: int) -> None:
        self.address = int(checked(f"locking {size} bytes of host memory", cudart.cudaMallocHost(size)))
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (self.address, False)}


class Stream:
    """One queue of work, which waits for no other."""

    def __init__(self) -> None:
        flags = cudart.cudaStreamNonBlocking
        self._stream = checked("opening a stream", cudart.cudaStreamCreateWithFlags(flags))
        self.handle = int(self._stream)

    def to_device(self, address: int, source: Array) -> None:
        """Copies a contiguous array of the host to ``address``."""
        kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        host = int(source.ctypes.data)
        checked("copying to the GPU", cudart.cudaMemcpyAsync(address, host, source.nbytes, kind, self._stream))

    def to_host(self, target: Array, address: int) -> None:
        """Copies from ``address`` into a contiguous array of the host."""
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        host = int(target.ctypes.data)
        checked("copying from the GPU", cudart.cudaMemcpyAsync(host, address, target.nbytes, kind, self._stream))

    def copy_rows(self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """Copies the first ``width`` bytes of ``rows`` rows that lie ``pitch`` bytes apart, within the GPU's memory."""
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        copied = cudart.cudaMemcpy2DAsync(target, pitch, source, source_pitch, width, rows, kind, self._stream)
        checked("moving rows", copied)

    def clear_rows(self, target: int, pitch: int, width: int, rows: int) -> None:
        """Sets the first ``width`` bytes of ``rows`` rows that lie ``pitch`` bytes apart to 0."""
        checked("clearing rows", cudart.cudaMemset2DAsync(target, pitch, 0, width, rows, self._stream))

    def wait(self) -> None:
        """Until all that was queued is done. Raises BundleError if some of it failed."""
        checked("running the engine", cudart.cudaStreamSynchronize(self._stream))

    def capture(self, work: Callable[[], object], own_copies: bool = False) -> Graph:
        """The operations that ``work`` queues here, as a graph; nothing runs. With ``own_copies`` the host's memory
        that it copies from and to is the caller's, and stays; else a graph that touches the host's is refused, for
        nobody says how long that lasts.

        Raises BundleError with the reason where there is no such graph; what CUDA keeps of a failure is cleared.
        """
        # Calls that allocate in other threads do not concern it.
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        checked("starting a capture", cudart.cudaStreamBeginCapture(self._stream, mode))
        failure: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001  (whatever it is, the capture has to end; raised below)
            failure = raised
        error, captured = cudart.cudaStreamEndCapture(self._stream)
        try:
            if error == cudart.cudaError_t.cudaSuccess:
                try:
                    return self._graph_of(captured, own_copies, failure)
                finally:
                    cudart.cudaGraphDestroy(captured)
            _require_done(failure)
            checked("capturing a run", (error,))
            raise AssertionError("unreachable")
        except BaseException:
            cudart.cudaGetLastError()  # the refusal would else be reported by the next call
            raise
        finally:
            del failure  # it holds this frame, and the frame would hold it, and what ``work`` is of

    def _graph_of(self, captured: Any, own_copies: bool, failure: BaseException | None) -> Graph:
        _require_done(failure)
        if not own_copies:
            _require_device_alone(captured)
        return Graph(checked("making a graph of a run", cudart.cudaGraphInstantiate(captured, 0)), self._stream)

    def start(self, graph: Graph) -> None:
        """Queues, here, work that was captured in another stream."""
        checked("starting the engine's graph", cudart.cudaGraphLaunch(graph.handle, self._stream))

    def close(self) -> None:
        """Waits for the queue to run dry and gives it back."""
        cudart.cudaStreamSynchronize(self._stream)
        cudart.cudaStreamDestroy(self._stream)


def _require_done(failure: BaseException | None) -> None:
    """Raises what ended the work of a capture: BundleError for what a library raised."""
    if failure is None:
        return
    if not is_of_library(failure):
        raise failure
    raise BundleError(said_by(failure)) from failure


def _require_device_alone(graph: Any) -> None:
    """Raises BundleError where ``graph`` calls functions of the host, copies from or to its memory, keeps memory, or
    does nothing at all."""
    kinds = cudart.cudaGraphNodeType
    _, count = _nodes(graph, 0)
    if not count:
        raise BundleError("a run queued nothing in its stream, so that there is no graph of it")
    nodes, _ = _nodes(graph, count)
    takes, gives = kinds.cudaGraphNodeTypeMemAlloc, kinds.cudaGraphNodeTypeMemFree
    others = (kinds.cudaGraphNodeTypeKernel, kinds.cudaGraphNodeTypeMemset, kinds.cudaGraphNodeTypeEmpty)
    kept = 0
    for node in nodes[:count]:
        kind, copy = _node(node)
        kept += (kind == takes) - (kind == gives)
        if kind not in (*others, takes, gives) and copy != cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice:
            raise BundleError("a run reads or calls the host, so that it is no graph of the GPU alone")
    if kept:
        raise BundleError("a run keeps memory that it took, so that it cannot be repeated as a graph")


def _node(node: Any) -> tuple[Any, Any]:
    """Its kind, None for one that cuda-bindings does not know, and of a copy which way it goes."""
    try:
        kind = checked("reading a graph", cudart.cudaGraphNodeGetType(node))
    except ValueError:
        return None, None
    if kind != cudart.cudaGraphNodeType.cudaGraphNodeTypeMemcpy:
        return kind, None
    return kind, checked("reading a graph", cudart.cudaGraphMemcpyNodeGetParams(node)).kind


def _nodes(graph: Any, most: int) -> tuple[list[Any], int]:
    error, nodes, count = cudart.cudaGraphGetNodes(graph, most)
    checked("reading a graph", (error,))
    return nodes or [], int(count)


class Graph:
    """Work that was captured once, started by one call."""

    def __init__(self, graph: Any, stream: Any) -> None:
        self.handle, self._stream = graph, stream

    def launch(self) -> None:
        """Queues it once, where it was captured."""
        checked("starting the engine's graph", cudart.cudaGraphLaunch(self.handle, self._stream))

    def close(self) -> None:
        """Frees it; it must not be running."""
        cudart.cudaGraphExecDestroy(self.handle)
