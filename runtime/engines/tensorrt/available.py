"""Whether this host has what plans need: TensorRT's Python package, its libraries, and CUDA's."""

from __future__ import annotations

from importlib import import_module

from ....errors import BundleIncompatibleError

# Bindings alone are not enough: the package "tensorrt" brings or finds the libraries.
_MODULES = ("tensorrt", "cuda.bindings.runtime")


def tensorrt_problem() -> str | None:
    """Why no plan can be built or run here, in one line, or None. Imports TensorRT where it is installed."""
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
    if problem := tensorrt_problem():
        raise BundleIncompatibleError(f"{what}: needs TensorRT: {problem}")
