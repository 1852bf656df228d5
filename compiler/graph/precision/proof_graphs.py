"""Proof graphs: what this host runs in ONNX Runtime to prove engines, whatever backend they are for.

An engine for TensorRT is a graph until its plan is built, and is proven by that graph. One in bfloat16, which no
processor computes with, is proven by a float32 emulation (emulation.py). Proof graphs have the names of their engines'
files and lie in a folder of their own, beside a link to the weight store; a bundle never holds them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.manifest import WEIGHTS_NAME, Manifest
from ....bundle.open_bundle import Bundle
from ....profiles.backends import BACKENDS, ONNXRUNTIME
from ....profiles.precision import PRECISIONS, Precision
from .emulation import emulated


def proof_graph(graph: bytes, precision: Precision) -> bytes:
    """What proves the emitted engine ``graph``: itself, or of bfloat16 its emulation."""
    return emulated(graph) if PRECISIONS[precision].is_emulated else graph


def in_onnx_runtime(engine: EngineEntry) -> EngineEntry:
    """``engine`` as this host runs it."""
    return engine if BACKENDS[engine.backend].runs_graphs else replace(engine, backend=ONNXRUNTIME.name)


def with_proof_graphs(bundle: Bundle, folder: Path) -> Bundle:
    """``bundle`` as this host runs it, with the proof graphs in ``folder``, whose hashes are not those it lists."""
    manifest = replace(_here(bundle.manifest), files=())
    return Bundle(folder.absolute(), manifest, bundle.build)


def _here(manifest: Manifest) -> Manifest:
    """``manifest`` with its engines as this host runs them."""
    generation = manifest.generation
    if generation is not None:
        generation = generation.with_engines(map(in_onnx_runtime, generation.every_engine))
    return replace(manifest, engines=tuple(map(in_onnx_runtime, manifest.engines)), generation=generation)


def link_shared_files(bundle: Bundle, folder: Path) -> None:
    """Puts what engines of ``bundle`` read beside their graphs into ``folder``, which is made."""
    folder.mkdir(exist_ok=True)
    for file in (WEIGHTS_NAME, *((bundle.manifest.text.file,) if bundle.manifest.text else ())):
        link(bundle.file(file), folder / file)


def link(source: Path, target: Path) -> None:
    """Makes ``target`` the same file as ``source``, or a copy where the file system has no hard links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def proof_bundle_in(bundle: Bundle, folder: Path) -> Bundle:
    """A written ``bundle`` as this host runs it: its own files, or proof graphs in ``folder`` where any differs."""
    engines = {engine.file: engine for engine in bundle.manifest.engines}
    if not any(PRECISIONS[engine.precision].is_emulated for engine in engines.values()):
        return replace(bundle, manifest=_here(bundle.manifest))
    link_shared_files(bundle, folder)
    for file, engine in engines.items():
        (folder / file).write_bytes(proof_graph(bundle.file(file).read_bytes(), engine.precision))
    return with_proof_graphs(bundle, folder)


@contextmanager
def proof_bundle(bundle: Bundle) -> Iterator[Bundle]:
    """``proof_bundle_in`` a temporary folder."""
    with TemporaryDirectory() as folder:
        yield proof_bundle_in(bundle, Path(folder))
