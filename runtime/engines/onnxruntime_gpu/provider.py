"""ONNX Runtime's providers for a GPU: what a host needs for one, and how a session is made to use it and nothing else.

``cuda``: ONNX Runtime's own kernels. Weights are views of one store on the GPU, whatever the number of engines.
``tensorrt``: TensorRT inside ONNX Runtime, with CUDA kernels for what it does not take. It builds an engine from each
graph when that is first opened, which takes minutes and is kept in nestforge's private cache folder, and each of them
owns its weights. It gets the ends of an engine's range, or it would build anew for each size beyond the ones seen.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, util
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.entries.generation_entry import GenerationEntry
from ....bundle.files import private_folder
from ....bundle.open_bundle import Bundle
from ....bundle.shape_profile import shape_profile
from ....errors import BundleIncompatibleError, InputError
from ...device.device import Device

_INSTALL = "install nestforge[cuda] in place of nestforge[cpu]"
# Operators of arithmetic on sizes. All have kernels on a GPU, so that what falls to the processor among them is that.
_SIZE_OPERATORS = frozenset(
    {
        *("Add", "Cast", "Concat", "Constant", "Div", "Equal", "Gather", "Identity", "Max", "Min", "Mul", "Range"),
        *("Reshape", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where"),
    }
)
_SHAPE_OPTIONS = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")
_HOPPER = (9, 0)
_CPU, _CUDA, _TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"


@dataclass(frozen=True)
class Provider:
    """How engines run on one device: ``chain`` are ONNX Runtime's providers; each takes what the ones before it
    leave. Where engines ``share`` weights, these are views of the store on the device. ``captures``: what a run queues
    may be repeated as a graph. ``take`` opens the device, and ``options`` are those of the chain for an engine: where
    what is built for it is kept, and its shapes as ``ShapeProfile.written`` has them."""

    name: str
    chain: tuple[str, ...]
    shares: bool
    captures: bool
    take: Callable[[], Device]
    options: Callable[[Device, Path | None, Sequence[str]], list[dict[str, str]]]

    def generates(self, entry: GenerationEntry) -> bool:
        """Whether the engines of ``entry`` have kernels there: caches of one capacity are in standard operators, and
        TensorRT inside ONNX Runtime would build them anew for each number of tokens."""
        return self.shares and bool(entry.capacities_for(1))

    def cache_folder(self, bundle: Bundle, engine: EngineEntry) -> Path | None:
        """Where what is built for ``engine`` is kept: by its graph, its weights, whether TF32 may be used, and the ends
        of a range, for TensorRT's own names of what it keeps follow from the graph alone. Raises OutputError."""
        if self.shares:
            return None
        files: Mapping[str, str] = {entry.path: entry.sha256 for entry in bundle.manifest.files}
        parts = [files[engine.file], bundle.manifest.weights_sha256 or "", os.environ.get("NVIDIA_TF32_OVERRIDE", "")]
        if not engine.bucket.is_static:
            parts.append(str(shape_profile(bundle.manifest, engine.bucket)))
        key = hashlib.sha256(" ".join(parts).encode()).hexdigest()
        folder = private_folder("tensorrt-provider") / key
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


def provider_named(name: str) -> Provider | None:
    """The provider ``name``, or None for ``cpu``, which has runners of its own.

    Raises InputError for an unknown name, BundleIncompatibleError where this host lacks something that it needs.
    """
    if not isinstance(name, str) or name not in PROVIDERS:
        raise InputError(f"provider {name!r:.80}: expected one of {', '.join(PROVIDERS)}")
    provider = PROVIDERS[name]
    if provider is None:
        return None
    if problem := provider_problem(provider.chain):
        raise BundleIncompatibleError(f"provider {name}: {problem}")
    _find_libraries()
    return provider


def require_providers(where: str, session: Any, provider: Provider) -> None:
    """Raises BundleIncompatibleError unless the session took exactly ``provider``'s chain.

    ONNX Runtime adds its CPU provider to every session; that no work falls to it is requested when one is opened.
    """
    found = [name for name in session.get_providers() if name != _CPU or _CPU in provider.chain]
    if found != list(provider.chain):
        raise BundleIncompatibleError(
            f"{where}: expected {', '.join(provider.chain)}, onnxruntime took {', '.join(found) or 'the processor'}"
        )


def require_on_device(where: str, session: Any, provider: Provider) -> None:
    """Raises BundleIncompatibleError where work of an engine of a range fell to the processor.

    ONNX Runtime computes there, on purpose, the sizes that reshapes ask for; ``session`` has recorded which nodes.
    """
    fell = [
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name not in provider.chain
        for node in part.get_nodes()
        if node.op_type not in _SIZE_OPERATORS
    ]
    if fell:
        raise BundleIncompatibleError(
            f"{where}: onnxruntime has no kernel for {', '.join(sorted(set(fell)))} on provider {provider.name}, and "
            f"would run {len(fell)} nodes on the processor; use provider cpu"
        )


@cache
def _find_libraries() -> None:
    """Loads NVIDIA's libraries from their Python packages, where they are not on the system's path."""
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        # It prints what it does not find; a session that needs it then says so.
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()


def _take_gpu() -> Device:
    from ...device.cuda_device import take_cuda_device

    device = take_cuda_device()
    if device.capability >= _HOPPER:
        # Every session has a handle of cuBLAS. There it has two workspaces by default, of 67 MB in all, of which one
        # stream uses one; with smaller ones products of float32 took half as long again (docs/gpu.md).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":32768:1")
    return device


def _cuda_options(device: Device, _folder: Path | None, _shapes: Sequence[str]) -> list[dict[str, str]]:
    return [
        {
            **_of_stream(device),
            "use_tf32": "0",  # beyond the tolerance of fp32, to which engines are proven
            "arena_extend_strategy": "kSameAsRequested",
            "enable_cuda_graph": "0",  # captured by ourselves, see session.py
        }
    ]


def _tensorrt_options(device: Device, folder: Path | None, shapes: Sequence[str]) -> list[dict[str, str]]:
    """It has no option for TF32, which TensorRT itself allows: only the process's NVIDIA_TF32_OVERRIDE=0 forbids it."""
    kept = {} if folder is None else {"trt_engine_cache_path": str(folder), "trt_timing_cache_path": str(folder)}
    return [
        {
            **_of_stream(device),
            "trt_engine_cache_enable": str(int(bool(kept))),
            "trt_timing_cache_enable": str(int(bool(kept))),
            **kept,
            **dict(zip(_SHAPE_OPTIONS, shapes, strict=False)),
            "trt_cuda_graph_enable": "0",
        },
        *_cuda_options(device, None, ()),
    ]


def _of_stream(device: Device) -> dict[str, str]:
    stream = getattr(device, "stream", None)
    handle = {} if stream is None else {"has_user_compute_stream": "1", "user_compute_stream": str(stream.handle)}
    return {"device_id": str(device.index), **handle}


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


# By name, whether this host has it or not; None are the runners of each back end.
PROVIDERS: Mapping[str, Provider | None] = MappingProxyType(
    {
        "cpu": None,
        "cuda": Provider("cuda", (_CUDA,), shares=True, captures=True, take=_take_gpu, options=_cuda_options),
        # Whether what TensorRT queues inside ONNX Runtime can be captured has not been tried.
        "tensorrt": Provider(
            "tensorrt", (_TENSORRT, _CUDA), shares=False, captures=False, take=_take_gpu, options=_tensorrt_options
        ),
    }
)
