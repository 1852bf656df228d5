"""How TensorRT opens engines: their plans, on a GPU; see ``Opener``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ....bundle.entries.engine_entry import EngineEntry, Residency
from ....bundle.open_bundle import Bundle
from ....errors import BundleIncompatibleError

if TYPE_CHECKING:
    from ...device.cuda_device import CudaDevice
    from .cached_runner import TensorRTCacheRunner
    from .runner import TensorRTRunner

# Bindings alone are not enough: the package "tensorrt" brings or finds the libraries.
_MODULES = ("tensorrt", "cuda.bindings.runtime")


def problem(precisions: Collection[str] = ()) -> str | None:  # noqa: ARG001
    """See ``Opener.problem``. Imports TensorRT where it is installed."""
    for name in _MODULES:
        try:
            import_module(name)
        except ModuleNotFoundError as failure:
            return f"{failure.name or name} is not installed; install nestforge[tensorrt]"
        except (ImportError, OSError) as failure:  # the package is there, a library that it needs is not
            return f"{name} does not load: {' '.join(str(failure).split())[:200]}"
    return None


def require_tensorrt(what: str) -> None:
    """Raises BundleIncompatibleError, which says that ``what`` is impossible here and why."""
    if said := problem():
        raise BundleIncompatibleError(f"{what}: needs TensorRT: {said}")


def open_runner(
    bundle: Bundle,
    engine: EngineEntry,
    residency: Residency,  # noqa: ARG001  (a plan owns its weights, on the GPU)
    threads: int,  # noqa: ARG001
    affinity: Sequence[int],  # noqa: ARG001
) -> TensorRTRunner | TensorRTCacheRunner:
    """See ``Opener.open_runner``. Raises BundleIncompatibleError where TensorRT is missing."""
    require_tensorrt(f"engine {engine.id}")
    if engine.kind.needs == "generation":
        from .cached_runner import TensorRTCacheRunner

        return TensorRTCacheRunner(bundle, engine)
    from .runner import TensorRTRunner

    return TensorRTRunner(bundle, engine)


def take_device() -> CudaDevice:
    """See ``Opener.take_device``."""
    from ...device.cuda_device import take_cuda_device

    return take_cuda_device()


def described() -> str:
    """See ``Opener.described``: the GPU, on which figures depend. Raises BundleError where there is none."""
    from .engine import this_gpu

    return str(this_gpu())
