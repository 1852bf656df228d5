"""A host with a GPU, and CUDA on it as far as the back end uses it: device memory is host memory."""

import ctypes
import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


@dataclass
class World:
    """One host: its GPU, its TensorRT, and what goes wrong on it. ``calls`` counts what was asked of TensorRT."""

    gpu: str = "Fake GPU"
    capability: tuple[int, int] = (8, 7)
    version: str = "10.3.0"
    free: int = 10**9
    captures: bool = True
    starts: bool = True
    parses: bool = True
    builds: bool = True
    opens: bool = True
    shares: bool = True  # says which outputs share memory with which inputs
    missing: tuple[str, ...] = ()
    off_by: float = 0.0
    more_rows: int = 0  # than it should have, in the shape of every output
    steps: int = 3
    graphs: int = 0  # that were made and not destroyed
    calls: list[str] = field(default_factory=list)
    crossed: list[int] = field(default_factory=list)  # bytes of each copy between the host and the GPU
    allocated: dict[int, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    module: ModuleType | None = None  # ``tensorrt``, once it is installed


Error = enum.Enum(
    "Error", "cudaSuccess cudaErrorMemoryAllocation cudaErrorStreamCaptureUnsupported cudaErrorStreamCaptureWrongThread"
)


@dataclass(frozen=True)
class Node:
    """One operation of a captured graph."""

    work: Callable[[], object]
    kind: str
    copy: int = 0


class FakeCuda(ModuleType):
    """``cuda.bindings.runtime``."""

    cudaError_t = Error
    cudaStreamNonBlocking = 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaGraphNodeType = SimpleNamespace(
        **{
            f"cudaGraphNodeType{name}": name
            for name in ("Kernel", "Memcpy", "Memset", "Host", "Empty", "MemAlloc", "MemFree")
        }
    )

    def __init__(self, world: World) -> None:
        super().__init__("cuda.bindings.runtime")
        self.world = world
        self.recorded: dict[int, list[Node]] = {}

    def submit(self, stream: int, work: Callable[[], object], kind: str = "Kernel", copy: int = 0) -> None:
        """Runs ``work`` now, or keeps it where ``stream`` is being captured."""
        if stream in self.recorded:
            self.recorded[stream].append(Node(work, kind, copy))
        else:
            work()

    def cudaGetErrorString(self, error: Error) -> tuple[Error, bytes]:
        return Error.cudaSuccess, {Error.cudaErrorMemoryAllocation: b"out of memory"}.get(error, error.name.encode())

    def cudaGetLastError(self) -> tuple[Error]:
        return (Error.cudaSuccess,)

    def cudaSetDevice(self, device: int) -> tuple[Error]:
        return (Error.cudaSuccess,)

    def cudaGetDeviceProperties(self, device: int) -> tuple[Error, Any]:
        major, minor = self.world.capability
        return Error.cudaSuccess, SimpleNamespace(name=self.world.gpu.encode() + b"\0", major=major, minor=minor)

    def cudaMemGetInfo(self) -> tuple[Error, int, int]:
        return Error.cudaSuccess, self.world.free, 2 * self.world.free

    def cudaMalloc(self, size: int) -> tuple[Error, int | None]:
        if size > self.world.free:
            return Error.cudaErrorMemoryAllocation, None
        memory = np.full(size, 0xFF, np.uint8)  # of floating point no number
        with self.world.lock:
            self.world.allocated[memory.ctypes.data] = memory
        return Error.cudaSuccess, memory.ctypes.data

    cudaMallocHost = cudaMalloc

    def cudaFree(self, address: int) -> tuple[Error]:
        with self.world.lock:
            del self.world.allocated[address]
        return (Error.cudaSuccess,)

    cudaFreeHost = cudaFree

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Error, int]:
        with self.world.lock:
            stream = 1 + max([a for a in self.world.allocated if a < 1000], default=0)
            self.world.allocated[stream] = "stream"
        return Error.cudaSuccess, stream

    def cudaStreamSynchronize(self, stream: int) -> tuple[Error]:
        return (Error.cudaSuccess,)

    cudaStreamDestroy = cudaFree

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> tuple[Error]:
        def copy() -> None:
            if kind != self.cudaMemcpyKind.cudaMemcpyDeviceToDevice:
                self.world.crossed.append(size)
            ctypes.memmove(target, source, size)

        self.submit(stream, copy, "Memcpy", kind)
        return (Error.cudaSuccess,)

    def cudaMemcpy2DAsync(
        self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int, kind: int, stream: int
    ) -> tuple[Error]:
        assert width <= min(pitch, source_pitch)
        self.world.calls.append(f"copy {rows}")
        for row in range(rows):
            self.cudaMemcpyAsync(target + row * pitch, source + row * source_pitch, width, kind, stream)
        return (Error.cudaSuccess,)

    def cudaMemset2DAsync(
        self, target: int, pitch: int, value: int, width: int, rows: int, stream: int
    ) -> tuple[Error]:
        assert width <= pitch
        for row in range(rows):
            self.submit(stream, lambda at=target + row * pitch: ctypes.memset(at, value, width), "Memset")
        return (Error.cudaSuccess,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[Error]:
        self.recorded[stream] = []
        self.capturing_thread = threading.get_ident()
        return (Error.cudaSuccess,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[Error, Any]:
        if threading.get_ident() != self.capturing_thread:
            return Error.cudaErrorStreamCaptureWrongThread, None
        work = self.recorded.pop(stream)
        if not self.world.captures:
            return Error.cudaErrorStreamCaptureUnsupported, None
        self.world.graphs += 1
        return Error.cudaSuccess, work

    def cudaGraphGetNodes(self, graph: list[Node], most: int) -> tuple[Error, list[Node], int]:
        return Error.cudaSuccess, graph[:most], len(graph)

    def cudaGraphNodeGetType(self, node: Node) -> tuple[Error, str]:
        return Error.cudaSuccess, node.kind

    def cudaGraphMemcpyNodeGetParams(self, node: Node) -> tuple[Error, Any]:
        return Error.cudaSuccess, SimpleNamespace(kind=node.copy)

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Error, Any]:
        self.world.graphs += 1
        return Error.cudaSuccess, graph

    def cudaGraphDestroy(self, graph: Any) -> tuple[Error]:
        self.world.graphs -= 1
        return (Error.cudaSuccess,)

    def cudaGraphLaunch(self, graph: Any, stream: int) -> tuple[Error]:
        self.world.calls.append("graph")
        for node in graph:
            node.work()
        return (Error.cudaSuccess,)

    cudaGraphExecDestroy = cudaGraphDestroy


# Imported where a plan is built or opened, never before TensorRT was found.
ON_A_GPU = frozenset(
    {
        *("runtime.device.cuda_memory", "runtime.device.cuda_device"),
        *(f"runtime.engines.tensorrt.{name}" for name in ("engine", "contexts", "runner", "cached_runner")),
        "compiler.tensorrt.build_plan",
    }
)
