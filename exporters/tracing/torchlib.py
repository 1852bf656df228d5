"""One reading of torchlib for the whole process.

``torch.onnx.export`` builds its registry of translations anew in every call: it reads and parses the source of 500
functions of onnxscript, a second of CPU time, which is a third of what tracing a small model takes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import cache
from threading import Lock

from torch.onnx._internal.exporter._registration import ONNXRegistry

_METHOD_NAME = "from_torchlib"
_ORIGINAL_METHOD = vars(ONNXRegistry)[_METHOD_NAME]
_read = cache(ONNXRegistry.from_torchlib)
_patched = Lock()


@contextlib.contextmanager
def torchlib_read_once() -> Iterator[None]:
    """An export inside takes the registry that the first one built, as a copy to which it may add translations."""
    with _patched:
        setattr(ONNXRegistry, _METHOD_NAME, staticmethod(_copy))
        try:
            yield
        finally:
            setattr(ONNXRegistry, _METHOD_NAME, _ORIGINAL_METHOD)


def _copy(opset_version: int) -> ONNXRegistry:
    registry = copy.copy(_read(opset_version))
    registry.functions = {target: list(functions) for target, functions in registry.functions.items()}
    return registry
