"""Runs of a session on memory of its caller's on the device: queued in its stream, and waited for by nobody here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxruntime

from ....errors import BundleError, InputError
from ....outside import is_of_library, said_by
from ...device.device import Device
from .session import GpuSession

# The number by which ONNX Runtime knows runs that are not captured, in a session that captures.
CALL_BY_CALL = -1


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
        """See ``DeviceCall.close``."""
        with self._device.lock:
            if self._session is None:
                return
            self.drop()
            self._forget(self)
            self._device.wait()  # what it queued may be running, on memory that the caller frees now

    def drop(self) -> None:
        """Lets go of the session, which is about to close."""
        self._session = self._binding = None
