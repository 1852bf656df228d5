"""What the runtime asks of a backend: one protocol, and the door that opens an engine with the right one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import util
from types import TracebackType
from typing import Protocol, Self

from ..errors import BundleIncompatibleError
from .arrays import Array
from .bundle import Bundle
from .manifest import EngineEntry
from .residency import RESIDENCIES, Residency
from .tensorrt_here import require_tensorrt, tensorrt_problem

# A runner is opened in a residency, so callers find both here.
__all__ = ["BACKENDS", "RESIDENCIES", "Residency", "Runner", "runnable_engines", "runner_for"]

BACKENDS = ("onnxruntime", "tensorrt")


class Runner(Protocol):
    """One engine on one backend. Entering it opens the engine; using it while inactive is an error."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def run(self, feeds: Mapping[str, Array], decisions: bool = False) -> list[Array]:
        """Outputs in the order of ``Manifest.interface``, owned by the caller; with ``decisions`` the engine's behind
        them, in the order of its entry.

        ``feeds`` has every input of it at exactly the bucket's shape and the stated dtype. Thread-safe.
        """
        ...

    def bind(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """A call that runs from ``feeds`` into ``outputs``, as often as it is made, without copying either.

        The arrays are C-contiguous and stay the caller's; an output without one is not fetched. One thread at a time
        may make the call. Raises InputError for an array that does not fit, BundleError while inactive; the call too.
        """
        ...


def runnable_engines(bundle: Bundle) -> tuple[EngineEntry, ...]:
    """The engines that this host has a backend for. Raises BundleIncompatibleError if there is none."""
    needed = {engine.backend for engine in bundle.manifest.engines}
    problems = {backend: _problem(backend) for backend in sorted(needed)}
    engines = tuple(engine for engine in bundle.manifest.engines if problems[engine.backend] is None)
    if not engines:
        missing = "; ".join(filter(None, problems.values()))
        raise BundleIncompatibleError(f"bundle {bundle.path}: this host cannot run its engines: {missing}")
    return engines


def _problem(backend: str) -> str | None:
    if backend == "tensorrt":
        return tensorrt_problem()
    return None if util.find_spec("onnxruntime") else "onnxruntime is not installed; install nestforge[cpu]"


def runner_for(bundle: Bundle, engine: EngineEntry, residency: Residency, threads: int) -> Runner:
    """An inactive runner for one engine, on ``threads`` cores; on a GPU those and ``residency`` mean nothing.

    Raises BundleIncompatibleError where TensorRT is needed and missing.
    """
    if engine.backend == "onnxruntime":
        from .onnxruntime_runner import OnnxRuntimeRunner

        return OnnxRuntimeRunner(bundle, engine, residency, threads)
    require_tensorrt(f"engine {engine.id}")
    from .tensorrt_runner import TensorRTRunner

    return TensorRTRunner(bundle, engine)
