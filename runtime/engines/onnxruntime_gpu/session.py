"""Sessions of ONNX Runtime on a device, whose weights are views of its store, and their runs on bound memory.

The first two runs of a binding are queued call by call, since one that is not repeated is not worth a capture; after
the second its kernels are captured as one CUDA graph, by which the following ones start. ONNX Runtime could capture by
itself, but not where sizes are computed on the processor, and it would release no graph before its session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.open_bundle import Bundle
from ....bundle.shape_profile import shape_profiles
from ....errors import BundleError, InputError
from ....outside import is_of_library, said_by
from ...device.device import Device, DeviceGraph
from ...device.layout import routes_of
from ...device.store import DeviceView, StoreUse
from ...graphs.initializers import files_of
from ...graphs.weight_store import store_initializers
from ..onnxruntime.session import open_error, require_tensors, stop_spinning
from .provider import Provider, require_on_device, require_providers

# As on the processor: the compiler has folded and fused what pays. Higher levels merge weights into private copies.
_OPTIMIZATION_LEVEL = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
# Every failure reaches the caller as an exception, so ONNX Runtime need not print it as well.
_LOG_FATAL_ONLY = 4
# Runs of a binding before its capture. In them ONNX Runtime takes the memory that the captured one must find.
CALL_BY_CALL = 2


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
        # It would keep one more block for the activations of every shape.
        settings.enable_mem_pattern = False
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
        """Queues a run, in the device's thread. Raises what ONNX Runtime does."""
        self._device.perform(lambda: self.queue(binding, options))

    def queue(self, binding: Any, options: Any) -> None:
        """Queues a run, called in the device's thread. Raises what ONNX Runtime does."""
        self.session.run_with_iobinding(binding, options)


class BoundRun:
    """A call that queues one run on bound memory. ``captures``: as a CUDA graph once it has been repeated.

    ``forget`` is called when it is closed.
    """

    def __init__(
        self,
        where: str,
        device: Device,
        session: GpuSession,
        binding: Any,
        captures: bool,
        forget: Callable[[BoundRun], None],
    ) -> None:
        self._where, self._device, self._captures, self._forget = where, device, captures, forget
        self._session: GpuSession | None = session
        self._binding: Any = binding
        self._options = onnxruntime.RunOptions()
        # The stream is ours, and whoever reads the outputs waits for it.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._runs = 0
        self._graph: DeviceGraph | None = None
        self.refusal: str | None = None  # why it could not be captured

    @property
    def is_captured(self) -> bool:
        """Whether the next run starts as one CUDA graph."""
        return self._graph is not None

    def __call__(self) -> None:
        """Raises BundleError where the GPU fails or once closed, InputError where the processor refuses the values."""
        with self._device.lock:
            session = self._session
            if session is None:
                raise BundleError(f"{self._where}: not open; run it inside its `with` block")
            if self._graph is not None:
                self._device.start(self._graph)
                return
            self._queue(session)
            self._runs += 1
            if self._captures and self._runs == CALL_BY_CALL:
                self._capture(session)

    def prove_graph(self, fetched: Callable[[], bytes]) -> None:
        """Lets go of its graph where that answers otherwise than a run call by call, by what ``fetched`` then returns:
        work that ONNX Runtime queued in another stream would be none of the graph's."""
        with self._device.lock:
            if self._graph is None or self._session is None:
                return
            self()
            by_graph = fetched()
            self._queue(self._session)
            if fetched() != by_graph:
                self._graph.close()
                self._graph, self.refusal = None, "as a graph a run answers otherwise"

    def close(self) -> None:
        with self._device.lock:
            if self._session is None:
                return
            try:
                self._device.wait()  # what it queued may be running, on memory that the caller frees now
            finally:
                self.drop()
                self._forget(self)

    def drop(self) -> None:
        """Lets go of the session, which is about to close; nothing of it is running."""
        self._session = self._binding = None
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.close()

    def _queue(self, session: GpuSession) -> None:
        try:
            session.run(self._binding, self._options)
        except BaseException as failure:
            if not is_of_library(failure):
                raise
            # Shapes and types have been checked, and kernels of a GPU do not look at values.
            error = BundleError if self._device.kind == "cuda" else InputError
            raise error(f"{self._where}: {said_by(failure)}") from failure

    def _capture(self, session: GpuSession) -> None:
        try:
            self._graph = self._device.capture(lambda: session.queue(self._binding, self._options))
        except BundleError as refusal:
            self.refusal = str(refusal)


class OpenEngine:
    """The session of ``engine`` on ``device``, with what it reads of the store there."""

    def __init__(self, bundle: Bundle, engine: EngineEntry, provider: Provider, device: Device) -> None:
        """Called under the device's lock. Raises BundleCorruptError or BundleIncompatibleError."""
        self.stores: list[StoreUse] = []
        inputs, outputs = bundle.manifest.interface_of(engine)
        path, bucket = bundle.file(engine.file), engine.bucket
        try:
            weights = bundle.manifest.weight_names
            with bundle.held(engine.file, *weights):
                folder = provider.cache_folder(bundle, engine)
                if folder is not None:  # what is built is kept by these hashes, so they must be those of the bytes
                    bundle.require_hashes(engine.file, *weights)
                views: dict[str, DeviceView] = {}
                initializers = store_initializers(bundle, engine)
                for file in files_of(initializers) if provider.shares else ():
                    self.stores.append(StoreUse(bundle.file(file), device))
                    views |= self.stores[-1].store.views([one for one in initializers if one.file == file], str(path))
                shapes = shape_profiles(bundle.manifest, engine)[0].written(inputs)
                options = provider.options(device, folder, shapes)
                self.session = GpuSession(path, provider, device, views, options, is_range=not bucket.is_static)
            found_inputs, found_outputs = self.session.session.get_inputs(), self.session.session.get_outputs()
            require_tensors(engine, "inputs", found_inputs, inputs)
            require_tensors(engine, "outputs", found_outputs, (*outputs, *routes_of(engine)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Called under the device's lock, once nothing of it runs."""
        if hasattr(self, "session"):
            del self.session  # it reads the store until it is gone
        while self.stores:
            self.stores.pop().close()
