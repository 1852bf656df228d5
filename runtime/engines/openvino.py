"""Engines in OpenVINO, on the processor: whole ones, in fp32 or bf16, at one shape or a range; see ``Opener``.

OpenVINO owns a copy of an engine's weights, whatever the residency. It looks nothing up and writes no file: no cache of
compiled models is named, and the package that reports its use is kept from being imported.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import import_module, util
from typing import Any

import numpy as np

from ...bundle.entries.engine_entry import EngineEntry, Residency
from ...bundle.open_bundle import Bundle
from ...errors import BundleCorruptError, BundleError, BundleIncompatibleError, InputError
from ...outside import library_errors
from ..device.layout import CopyingRunner, Layout
from ..graphs.weight_store import store_initializers
from ..inputs.arrays import Array

_DEVICE = "CPU"
# Its hint of what to compute in, and the capability that the processor must have; left to itself it would compute
# engines in fp32 in bf16 where the processor has that.
_HINTS = {"bf16": "bf16"}
_CAPABILITIES = {"bf16": "BF16"}

take_device = None  # engines run on the processor, in memory of their callers


def problem(precisions: Collection[str] = ()) -> str | None:
    """See ``Opener.problem``."""
    if util.find_spec("openvino") is None:
        return "openvino is not installed; install nestforge[openvino]"
    try:
        with library_errors(BundleIncompatibleError):
            has = _core().get_property(_DEVICE, "OPTIMIZATION_CAPABILITIES") if precisions else ()
    except BundleIncompatibleError as failure:
        return f"openvino does not load: {failure}"
    missing = [one for one in precisions if _CAPABILITIES.get(one, "FP32") not in has]
    return f"this processor does not compute in {', '.join(missing)}" if missing else None


def open_runner(
    bundle: Bundle,
    engine: EngineEntry,
    residency: Residency,  # noqa: ARG001  (it owns its weights)
    threads: int,
    affinity: Sequence[int],
) -> OpenVinoRunner:
    """See ``Opener.open_runner``. Raises InputError for an ``affinity``: OpenVINO places its threads itself."""
    if said := problem((engine.precision,)):
        raise BundleIncompatibleError(f"engine {engine.id}: {said}")
    if affinity:
        raise InputError(f"affinity: expected none, since engine {engine.id} runs in OpenVINO, which places threads")
    return OpenVinoRunner(bundle, engine, threads)


def described() -> str:
    """See ``Opener.described``: its release, on which figures depend."""
    return f"OpenVINO {_library().__version__.partition('-')[0]}"


class OpenVinoRunner(CopyingRunner):
    """One engine as one compiled model. Each run that is under way has an inference request of its own."""

    _opened: Any

    def __init__(self, bundle: Bundle, engine: EngineEntry, threads: int) -> None:
        super().__init__(bundle, engine)
        self._threads = threads
        self._idle: list[Any] = []

    def __enter__(self) -> OpenVinoRunner:
        """Compiles the graph. Raises BundleCorruptError or BundleIncompatibleError."""
        settings = {
            "INFERENCE_PRECISION_HINT": _HINTS.get(self.engine.precision, "f32"),
            "INFERENCE_NUM_THREADS": self._threads,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
        }
        with self._bundle.held(self.engine.file, *self._bundle.manifest.weight_names):
            store_initializers(self._bundle, self.engine)  # checks where they lie
            path = self._bundle.file(self.engine.file)
            with library_errors(lambda said: BundleIncompatibleError(f"{path}: {described()} cannot open it: {said}")):
                opened = _core().compile_model(_core().read_model(path), _DEVICE, settings)
            self._check_interface(opened)
        self._opened = opened
        return self

    def __exit__(self, *_: object) -> None:
        self._opened, self._idle = None, []

    def _run(self, layout: Layout, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        opened, idle = self._opened, self._idle
        if opened is None:
            raise BundleError(f"{self._where}: not open; run it inside its `with` block")
        try:
            request = idle.pop()
        except IndexError:
            with library_errors(lambda said: BundleError(f"{self._where}: OpenVINO made no request: {said}")):
                request = opened.create_infer_request()
        # Those that the caller does not want too: a request keeps the memory that it was given last.
        unread = {
            name: np.empty(slot.shape, slot.dtype) for name, slot in layout.outputs.items() if name not in outputs
        }
        with library_errors(lambda said: InputError(f"{self._where}: {said}")):
            # A tensor keeps no array alive, and takes none that may not be written: of such a one it gets a copy.
            arrays = {name: np.require(array, requirements="W") for name, array in feeds.items()} | {
                **outputs,
                **unread,
            }
            for name, array in arrays.items():
                request.set_tensor(name, _library().Tensor(array, shared_memory=True))
            request.infer()
        idle.append(request)

    def _check_interface(self, opened: Any) -> None:
        """The model has exactly the manifest's inputs, outputs and routes, with its bucket's sizes."""
        for kind, found, specs in (("input", opened.inputs, self._inputs), ("output", opened.outputs, self._returned)):
            have = {each.any_name: (str(each.element_type.to_dtype()), _sizes(each.partial_shape)) for each in found}
            want = {spec.name: (spec.dtype, _free(spec.declared(self.engine.bucket))) for spec in specs}
            if have != want:
                raise BundleCorruptError(f"{self._where}: {kind}s are {have}, the manifest says {want}")


@cache
def _library() -> Any:
    """The package, without the one that reports its use: that looks up and writes to what is its own."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # which makes its import fail
    return import_module("openvino")


@cache
def _core() -> Any:
    core = _library().Core()
    core.set_property({"ENABLE_MMAP": False})  # what is written to the store later changes no open engine
    return core


def _sizes(shape: Any) -> tuple[int | None, ...]:
    """Extents, None where one is free."""
    return tuple(dim.get_length() if dim.is_static else None for dim in shape)


def _free(declared: Sequence[int | str]) -> tuple[int | None, ...]:
    """The same of a shape that the manifest declares."""
    return tuple(None if isinstance(dim, str) else dim for dim in declared)
