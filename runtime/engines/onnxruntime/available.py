"""Whether this host has what engines on the processor need: ONNX Runtime."""

from __future__ import annotations

from importlib import util


def onnxruntime_problem() -> str | None:
    """Why no engine can run here, in one line, or None. Imports nothing."""
    return None if util.find_spec("onnxruntime") else "onnxruntime is not installed; install nestforge[cpu]"
