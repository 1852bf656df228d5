"""An execution context of an engine with its own stream and memory, for one run at a time."""

from __future__ import annotations

from collections.abc import Mapping

import tensorrt as trt

from ....errors import BundleError
from ...device.cuda_memory import Blocks, Graph, Stream
from ...device.layout import Layout, Layouts
from ...inputs.arrays import Array


class ExecutionContext:
    """Runs an engine at its one shape, or at any shape of its range, in memory for the largest.

    Inputs go over in one copy. Where there is one shape, the copy and the kernels start as one CUDA graph; where that
    cannot be captured, and for each run of a range, they are queued one by one: a graph is of one shape.
    """

    def __init__(self, where: str, engine: trt.ICudaEngine, layouts: Layouts) -> None:
        """Opens a context and runs it once, on zeros: what TensorRT allocates late must not fall into the capture."""
        self._where, self._is_range = where, not layouts.bucket.is_static
        self._stream = Stream()
        self._blocks: Blocks | None = None
        self._context: trt.IExecutionContext | None = None
        self._graph: Graph | None = None
        self._layout = layouts.largest
        try:
            self._blocks = blocks = Blocks(layouts.largest.bytes)
            context: trt.IExecutionContext | None = engine.create_execution_context()
            if context is None:
                raise BundleError(f"{where}: TensorRT opened no context; the GPU may have too little free memory")
            self._context = context
            self._place(context, blocks, layouts.largest)
            blocks.host[:] = 0
            if not self._queue():
                raise BundleError(f"{where}: TensorRT refused to run")
            self._stream.wait()
            if not self._is_range:
                self._graph = self._stream.capture(self._queue)
        except BaseException:
            self.close()
            raise

    @property
    def is_captured(self) -> bool:
        """Whether runs start as one CUDA graph."""
        return self._graph is not None

    def run(self, layout: Layout, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Runs from ``feeds`` into ``outputs``, which both fit ``layout``; an output that is left out stays there.

        Raises BundleError where CUDA or TensorRT fails; the context is of no use afterwards.
        """
        blocks, context = self._blocks, self._context
        if blocks is None or context is None:
            raise BundleError(f"{self._where}: not open; run it inside its `with` block")
        if layout != self._layout:
            self._place(context, blocks, layout)
        for name, slot in layout.inputs.items():
            slot.host_view(blocks.host)[...] = feeds[name]
        if self._graph is not None:
            self._graph.launch()
        elif not self._queue():
            raise BundleError(f"{self._where}: TensorRT refused to run")
        for name in outputs:
            slot = layout.outputs[name]
            self._stream.to_host(blocks, slot.offset, slot.bytes)
        self._stream.wait()
        for name, array in outputs.items():
            array[...] = layout.outputs[name].host_view(blocks.host)

    def close(self) -> None:
        """Frees everything; a second call does nothing."""
        blocks, self._blocks = self._blocks, None
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        self._context = None
        self._stream.close()
        if blocks is not None:
            blocks.close()

    def _place(self, context: trt.IExecutionContext, blocks: Blocks, layout: Layout) -> None:
        """Sets where TensorRT finds tensors from now on and, in a range, their shapes."""
        if self._is_range:
            self._set_shapes(context, layout)
        for name, slot in (*layout.inputs.items(), *layout.outputs.items()):
            if not context.set_tensor_address(name, blocks.device + slot.offset):
                raise BundleError(f"{self._where}: TensorRT refused the memory of {name}")
        self._layout = layout

    def _set_shapes(self, context: trt.IExecutionContext, layout: Layout) -> None:
        """Of the inputs; the outputs then have theirs, or they would be written past their memory."""
        for name, slot in layout.inputs.items():
            if not context.set_input_shape(name, trt.Dims(list(slot.shape))):
                raise BundleError(f"{self._where}: TensorRT refused shape {list(slot.shape)} of {name}")
        if unknown := context.infer_shapes():
            raise BundleError(f"{self._where}: TensorRT does not know the shape of {', '.join(unknown)}")
        for name, slot in layout.outputs.items():
            found = tuple(context.get_tensor_shape(name))
            if found != slot.shape:
                raise BundleError(f"{self._where}: {name}: expected shape {list(slot.shape)}, got {list(found)}")

    def _queue(self) -> bool:
        assert self._blocks is not None
        assert self._context is not None
        self._stream.to_device(self._blocks, self._layout.input_bytes)
        queued: bool = self._context.execute_async_v3(self._stream.handle)
        return queued
