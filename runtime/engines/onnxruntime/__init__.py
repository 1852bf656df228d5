"""How ONNX Runtime opens engines, on the processor; see ``Opener``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module, util
from typing import TYPE_CHECKING

from ....bundle.entries.engine_entry import EngineEntry, Residency
from ....bundle.open_bundle import Bundle

if TYPE_CHECKING:
    from .runner import OnnxRuntimeRunner

take_device = None  # engines run on the processor, in memory of their callers


def problem(precisions: Collection[str] = ()) -> str | None:  # noqa: ARG001
    """See ``Opener.problem``. Imports nothing."""
    return None if util.find_spec("onnxruntime") else "onnxruntime is not installed; install nestforge[cpu]"


def open_runner(
    bundle: Bundle, engine: EngineEntry, residency: Residency, threads: int, affinity: Sequence[int]
) -> OnnxRuntimeRunner:
    """See ``Opener.open_runner``."""
    from .runner import OnnxRuntimeRunner

    return OnnxRuntimeRunner(bundle, engine, residency, threads, affinity)


def described() -> str:
    """See ``Opener.described``: its providers."""
    return ", ".join(import_module("onnxruntime").get_available_providers())
