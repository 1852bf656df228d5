"""Runs of an engine on what stays on the GPU: new tokens go over, logits come back, nothing else is copied.

Each has page-locked memory of its own. The first two runs are queued call by call, since one that is not repeated, such
as a chunk of a prompt, is not worth a capture; after the second all of it, copies and kernels, is captured as one CUDA
graph, by which the following ones start. Where it cannot be captured they stay as they are, and so do those of an
engine whose memory may move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ....bundle.entries.generation_entry import PAST, PRESENT
from ....errors import BundleError
from ...device.cuda_memory import Blocks, Graph, Stream, use_device
from ...device.device import DeviceArray
from ...device.layout import Layout
from ...inputs.arrays import Array
from .cache_context import Binding, CacheContext

# Runs before the capture.
_CALL_BY_CALL = 2


class CacheRun:
    """A call that runs from arrays of the host into arrays of the host, and returns once they are written."""

    def __init__(
        self,
        context: CacheContext,
        profile: int,
        layout: Layout,
        feeds: Mapping[str, Array],
        outputs: Mapping[str, Array],
        read: Mapping[str, DeviceArray],
        made: Mapping[str, DeviceArray],
        forget: Callable[[CacheRun], None],
    ) -> None:
        """What lies on the device is ``read``, by the names of inputs, caches among it, which are updated, or ``made``,
        by those of outputs; ``forget`` is called when the run is closed. Made under the device's lock. Raises
        BundleIncompatibleError where memory is short."""
        self._context, self._layout, self._forget = context, layout, forget
        self._feeds, self._outputs = feeds, outputs
        self._blocks: Blocks | None = Blocks(layout.bytes)
        self._graph: Graph | None = None
        self._runs = 0
        block = self._blocks.device
        slots = {**layout.inputs, **layout.outputs}
        updated = {PRESENT + name.removeprefix(PAST): array for name, array in read.items() if name.startswith(PAST)}
        written = {**updated, **made}
        self._binding = Binding(
            profile,
            {name: slot.shape for name, slot in layout.inputs.items()}
            | {name: array.shape for name, array in read.items()},
            {name: slot.shape for name, slot in layout.outputs.items()}
            | {name: array.shape for name, array in written.items()},
            {name: block + slot.offset for name, slot in slots.items()}
            | {name: array.address for name, array in (*read.items(), *written.items())},
        )

    @property
    def is_captured(self) -> bool:
        """Whether the next run starts as one CUDA graph."""
        return self._graph is not None

    def __call__(self) -> None:
        """Raises BundleError where CUDA or TensorRT fails, or once the run or the engine is closed."""
        device = self._context.device
        with device.lock:
            use_device(device.index)
            blocks = self._blocks
            if blocks is None:
                raise BundleError(f"{self._context.where}: not open; run it inside its `with` block")
            for name, slot in self._layout.inputs.items():
                slot.host_view(blocks.host)[...] = self._feeds[name]
            if self._graph is not None:
                device.stream.start(self._graph)
            else:
                self._context.bind(self._binding)
                if not self._queue(blocks, device.stream):
                    raise BundleError(f"{self._context.where}: TensorRT refused to run")
            device.stream.wait()
            for name, array in self._outputs.items():
                array[...] = self._layout.outputs[name].host_view(blocks.host)
            self._runs += 1
            if self._runs == _CALL_BY_CALL and self._context.stays:
                self._capture(blocks)

    def close(self) -> None:
        """See ``DeviceCall.close``. Nothing of it is queued: every run was waited for."""
        device = self._context.device
        with device.lock:
            blocks, self._blocks = self._blocks, None
            if blocks is None:
                return
            use_device(device.index)
            self._forget(self)
            device.wait()  # a run that was interrupted while it was waited for
            if self._graph is not None:
                self._graph.close()
                self._graph = None
            blocks.close()

    def _queue(self, blocks: Blocks, stream: Stream) -> bool:
        stream.to_device(blocks, self._layout.input_bytes)
        queued = self._context.queue(stream)
        for name in self._outputs:
            slot = self._layout.outputs[name]
            stream.to_host(blocks, slot.offset, slot.bytes)
        return queued

    def _capture(self, blocks: Blocks) -> None:
        """Of what is bound: nothing else has run since, as TensorRT asks of a capture."""
        # Of its own: other threads may queue work in the device's stream, which must not be captured.
        stream = Stream()
        try:
            self._graph = stream.capture(lambda: self._queue(blocks, stream))
        finally:
            stream.close()
