"""Sessions of ONNX Runtime on a device, whose weights are views of its store, and their runs on bound memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from ....errors import BundleError, InputError
from ....outside import is_of_library, said_by
from ...device.device import Device
from ...device.store import DeviceView
from ..onnxruntime.session import open_error, stop_spinning
from .provider import Provider, require_on_device, require_providers

# As on the processor: the compiler has folded and fused what pays. Higher levels merge weights into private copies.
_OPTIMIZATION_LEVEL = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
# Every failure reaches the caller as an exception, so ONNX Runtime need not print it as well.
_LOG_FATAL_ONLY = 4
# The number by which ONNX Runtime knows runs that are not captured, in a session that captures.
CALL_BY_CALL = -1


class GpuSession:
    """One open session; ``views`` are its initializers by name, which it reads in place until it is closed."""

    def __init__(
        self,
        path: Path,
        provider: Provider,
        device: Device,
        views: Mapping[str, DeviceView],
        options: list[dict[str, str]],
        is_range: bool = False,
    ) -> None:
        """``path`` is absolute: ONNX Runtime then confines the weights to its folder. ``is_range``: the graph computes
        sizes, which ONNX Runtime does on the processor; other nodes there are refused once it is open.

        Raises BundleCorruptError or BundleIncompatibleError.
        """
        self._device = device
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = _LOG_FATAL_ONLY
        settings.graph_optimization_level = _OPTIMIZATION_LEVEL
        settings.add_session_config_entry("session.disable_prepacking", "1")
        stop_spinning(settings)
        if is_range:
            settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        elif "CPUExecutionProvider" not in provider.chain:
            settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        # Options do not keep values alive, and the session reads them in place.
        self._values = {name: onnxruntime.OrtValue.from_dlpack(view) for name, view in views.items()}
        for name, value in self._values.items():
            settings.add_initializer(name, value)
        providers = list(zip(provider.chain, options, strict=True))
        try:
            self.session: Any = device.perform(
                lambda: onnxruntime.InferenceSession(str(path), settings, providers=providers, enable_fallback=0)
            )
        except BaseException as failure:
            if not is_of_library(failure):
                raise
            raise open_error(failure)(
                f"{path}: onnxruntime {onnxruntime.__version__} ({provider.name}) cannot open it: {said_by(failure)}"
            ) from failure
        require_providers(str(path), self.session, provider)
        if is_range:
            require_on_device(str(path), self.session, provider)

    def binding(self, inputs: Iterable[Any], outputs: Iterable[Any]) -> Any:
        """Inputs and outputs ``(name, DeviceArray)`` bound where they lie; an output without one is not computed for
        the caller."""
        binding = self.session.io_binding()
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, array in tensors:
                kind = np.dtype(array.dtype).type
                bind(name, self._device.kind, self._device.index, kind, list(array.shape), array.address)
        return binding

    def run(self, binding: Any, options: Any) -> None:
        """Queues a run. Raises what ONNX Runtime does."""
        self._device.perform(lambda: self.session.run_with_iobinding(binding, options))


class BoundRun:
    """A call that queues one run on bound memory; with ``graph``, the number of one, as that CUDA graph, which the
    session captures in the first call, or with CALL_BY_CALL as none.

    ``forget`` is called when it is closed. The graph stays with the session, which can release none.
    """

    def __init__(
        self,
        where: str,
        device: Device,
        session: GpuSession,
        binding: Any,
        graph: int | None,
        forget: Callable[[BoundRun], None],
    ) -> None:
        self._where, self._device, self._forget = where, device, forget
        self._session: GpuSession | None = session
        self._binding: Any = binding
        self._options = onnxruntime.RunOptions()
        # The stream is ours, and whoever reads the outputs waits for it.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._captures = graph is not None and graph != CALL_BY_CALL  # in the next call
        if graph is not None:
            self._options.add_run_config_entry("gpu_graph_id", str(graph))

    def __call__(self) -> None:
        """Raises BundleError where the GPU fails or once closed, InputError where the processor refuses the values."""
        with self._device.lock:
            session = self._session
            if session is None:
                raise BundleError(f"{self._where}: not open; run it inside its `with` block")
            try:
                session.run(self._binding, self._options)
                self._captures = False
            except BaseException as failure:
                if not is_of_library(failure):
                    raise
                if self._captures:  # the stream is every session's, and runs in none while it captures
                    self._device.end_capture()
                # Shapes and types have been checked, and kernels of a GPU do not look at values.
                error = BundleError if self._device.kind == "cuda" else InputError
                raise error(f"{self._where}: {said_by(failure)}") from failure

    def close(self) -> None:
        with self._device.lock:
            if self._session is None:
                return
            self.drop()
            self._forget(self)
            self._device.wait()  # what it queued may be running, on memory that the caller frees now

    def drop(self) -> None:
        """Lets go of the session, which is about to close."""
        self._session = self._binding = None


def is_short_of_memory(reason: str) -> bool:
    """Whether CUDA, its libraries or ONNX Runtime's arena found too little memory, by their own words."""
    words = ("out of memory", "failed to allocate memory", "alloc_failed")
    return any(word in reason.lower() for word in words)
