"""An execution context of an engine with its own stream and memory, for one run at a time."""

from __future__ import annotations

from collections.abc import Mapping

import tensorrt as trt

from ....errors import BundleError
from ...device.cuda_memory import Blocks, Graph, Stream
from ...device.layout import Layout
from ...inputs.arrays import Array


class ExecutionContext:
    """Runs an engine at its one shape.

    Inputs go over in one copy, and the copy and the kernels start as one CUDA graph; where TensorRT's work cannot be
    captured, they are queued one by one.
    """

    def __init__(self, where: str, engine: trt.ICudaEngine, layout: Layout) -> None:
        """Opens a context and runs it once, on zeros: what TensorRT allocates late must not fall into the capture."""
        self._where, self._layout = where, layout
        self._stream = Stream()
        self._blocks: Blocks | None = None
        self._context: trt.IExecutionContext | None = None
        self._graph: Graph | None = None
        try:
            self._blocks = blocks = Blocks(layout.bytes)
            self._views = {name: slot.host_view(blocks.host) for name, slot in layout.inputs.items()}
            self._results = {name: slot.host_view(blocks.host) for name, slot in layout.outputs.items()}
            context: trt.IExecutionContext | None = engine.create_execution_context()
            if context is None:
                raise BundleError(f"{where}: TensorRT opened no context; the GPU may have too little free memory")
            self._context = context
            for name, slot in (*layout.inputs.items(), *layout.outputs.items()):
                if not context.set_tensor_address(name, blocks.device + slot.offset):
                    raise BundleError(f"{where}: TensorRT refused the memory of {name}")
            blocks.host[:] = 0
            if not self._queue():
                raise BundleError(f"{where}: TensorRT refused to run")
            self._stream.wait()
            self._graph = self._stream.capture(self._queue)
        except BaseException:
            self.close()
            raise

    @property
    def is_captured(self) -> bool:
        """Whether runs start as one CUDA graph."""
        return self._graph is not None

    def run(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Runs from ``feeds`` into ``outputs``, which both fit the layout; an output that is left out stays there.

        Raises BundleError where CUDA or TensorRT fails; the context is of no use afterwards.
        """
        blocks = self._blocks
        if blocks is None:
            raise BundleError(f"{self._where}: not open; run it inside its `with` block")
        for name, view in self._views.items():
            view[...] = feeds[name]
        if self._graph is not None:
            self._graph.launch()
        elif not self._queue():
            raise BundleError(f"{self._where}: TensorRT refused to run")
        for name in outputs:
            slot = self._layout.outputs[name]
            self._stream.to_host(blocks, slot.offset, slot.bytes)
        self._stream.wait()
        for name, array in outputs.items():
            array[...] = self._results[name]

    def close(self) -> None:
        """Frees everything; a second call does nothing."""
        blocks, self._blocks = self._blocks, None
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        self._views, self._results = {}, {}
        self._context = None
        self._stream.close()
        if blocks is not None:
            blocks.close()

    def _queue(self) -> bool:
        assert self._blocks is not None
        assert self._context is not None
        self._stream.to_device(self._blocks, self._layout.input_bytes)
        queued: bool = self._context.execute_async_v3(self._stream.handle)
        return queued
