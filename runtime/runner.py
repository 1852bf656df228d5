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

# A runner is opened in a residency, so callers find both here.
__all__ = ["BACKENDS", "RESIDENCIES", "Residency", "Runner", "runnable_engines", "runner_for"]

# Backends that this release can run, and the package that each needs.
BACKENDS = {"onnxruntime": "onnxruntime"}


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
    here = {backend for backend, package in BACKENDS.items() if util.find_spec(package)}
    engines = tuple(engine for engine in bundle.manifest.engines if engine.backend in here)
    if not engines:
        needed = ", ".join(sorted({engine.backend for engine in bundle.manifest.engines}))
        raise BundleIncompatibleError(
            f"bundle {bundle.path}: its engines need {needed}, this host has "
            f"{', '.join(sorted(here)) or 'no backend'}; install the extra that brings it, such as nestforge[cpu]"
        )
    return engines


def runner_for(bundle: Bundle, engine: EngineEntry, residency: Residency, threads: int) -> Runner:
    """An inactive runner for one engine, on ``threads`` cores.

    Raises BundleIncompatibleError for a backend that this release cannot run.
    """
    if engine.backend == "onnxruntime":
        from .onnxruntime_runner import OnnxRuntimeRunner

        return OnnxRuntimeRunner(bundle, engine, residency, threads)
    raise BundleIncompatibleError(f"engine {engine.id}: backend {engine.backend} cannot run here; compile for another")
