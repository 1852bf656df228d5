"""Engines as this host runs them while they are proven: graphs in ONNX Runtime, whatever backend they are for.

An engine for TensorRT is a graph until its plan is built. One in bfloat16, which no processor computes with, is proven
by a float32 emulation (emulation.py), a file that lies beside it as long as it is needed and is never published.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from ....runtime.bundle.manifest import WEIGHTS_NAME, EngineEntry
from ....runtime.bundle.open_bundle import Bundle
from .emulation import emulated

_GRAPH = ".onnx"
_EMULATION = ".emulation.onnx"


def is_emulation(file: str) -> bool:
    """Whether a file is no engine of a bundle, but stands for one while it is proven."""
    return file.endswith(_EMULATION)


def proof_file(engine: EngineEntry) -> str:
    """The file that this host runs in place of the engine's own; of an emulation itself its own."""
    is_own = engine.precision != "bf16" or is_emulation(engine.file)
    return engine.file if is_own else engine.file.removesuffix(_GRAPH) + _EMULATION


def in_onnx_runtime(bundle: Bundle) -> Bundle:
    """``bundle`` with its engines as this host runs them; emulations must lie beside them."""
    engines = (replace(engine, backend="onnxruntime", file=proof_file(engine)) for engine in bundle.manifest.engines)
    return replace(bundle, manifest=replace(bundle.manifest, engines=tuple(engines)))


def for_backend(bundle: Bundle, backend: Literal["onnxruntime", "tensorrt"]) -> Bundle:
    """``bundle`` with its engines for ``backend``, as a device has them."""
    engines = (replace(engine, backend=backend) for engine in bundle.manifest.engines)
    return replace(bundle, manifest=replace(bundle.manifest, engines=tuple(engines)))


@contextmanager
def proof_bundle(bundle: Bundle) -> Iterator[Bundle]:
    """A published ``bundle`` as this host runs it: itself, or a copy with emulations in a temporary folder."""
    engines = {engine.file: engine for engine in bundle.manifest.engines}
    if all(proof_file(engine) == file for file, engine in engines.items()):
        yield in_onnx_runtime(bundle)
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file in (WEIGHTS_NAME, *((bundle.manifest.text.file,) if bundle.manifest.text else ())):
            shutil.copyfile(bundle.file(file), folder / file)
        for file, engine in engines.items():
            graph = bundle.file(file).read_bytes()
            (folder / proof_file(engine)).write_bytes(emulated(graph) if engine.precision == "bf16" else graph)
        yield in_onnx_runtime(Bundle(folder, bundle.manifest, bundle.build))
