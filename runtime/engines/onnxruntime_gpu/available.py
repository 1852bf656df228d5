"""Whether this host has what ONNX Runtime's providers for a GPU need: a build with them, and CUDA's from Python."""

from __future__ import annotations

from importlib import import_module, util

_INSTALL = "install nestforge[cuda] in place of nestforge[cpu]"


def provider_problem(chain: tuple[str, ...]) -> str | None:
    """Why no session on ``chain`` (ONNX Runtime's names) can be opened here, in one line, or None."""
    if util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed; install nestforge[cuda]"
    import onnxruntime

    installed = onnxruntime.get_available_providers()
    if missing := [name for name in chain if name not in installed]:
        return f"onnxruntime {onnxruntime.__version__} here has {', '.join(installed)} and no {missing[0]}; {_INSTALL}"
    try:
        import_module("cuda.bindings.runtime")
    except ModuleNotFoundError:
        return "cuda.bindings is not installed; install nestforge[cuda]"
    except (ImportError, OSError) as failure:
        return f"cuda.bindings does not load: {' '.join(str(failure).split())[:200]}"
    return None
