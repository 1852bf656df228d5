"""The processor as a provider: the code that serves GPUs, on a device that every machine has."""

from __future__ import annotations

from nestforge.runtime.device.device import HostDevice
from nestforge.runtime.engines.onnxruntime_gpu.provider import Provider


def host_provider(device: HostDevice | None = None) -> Provider:
    """ONNX Runtime's kernels for the processor, with weights as views of a store in ``device``'s memory."""
    here = device or HostDevice()
    return Provider("host", ("CPUExecutionProvider",), True, False, lambda: here, lambda *_: [{}])
