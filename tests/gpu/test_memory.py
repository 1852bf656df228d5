"""The GPU's memory that engines on the CUDA provider take, by cudaMemGetInfo, each case in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from nestforge.bundle.open_bundle import Bundle
from support.gpu_available import Results

PROGRAM = Path(__file__).resolve().parents[1] / "support" / "gpu_memory.py"


pytestmark = pytest.mark.needs_gpu


def memory(bundle: Bundle, engines: Iterable[str], **settings: str) -> int:
    command = [sys.executable, str(PROGRAM), str(bundle.path), *engines]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **settings})
    return int(done.stdout)


def test_eight_submodels_take_little_more_than_the_largest(wide: Bundle, results: Results) -> None:
    """A session has a handle of cuDNN, of 8 MB, activations and a CUDA graph of its own, and no weights."""
    engines = {engine.submodel: engine.id for engine in wide.manifest.engines}
    assert len(engines) == 8
    largest = max(wide.manifest.submodels, key=lambda entry: entry.weight_bytes).id
    weights = wide.manifest.submodel(largest).weight_bytes
    alone, together = memory(wide, [engines[largest]]), memory(wide, engines.values())
    each = (together - alone) / 7
    packed = sum(entry.weight_bytes for entry in wide.manifest.submodels)
    results.add(
        "memory of eight submodels against the largest alone",
        f"{together / alone:.3f}x ({together / 1e6:.0f} against {alone / 1e6:.0f} MB), {each / 1e6:.1f} MB each",
        "<= 24 MB each",
        f"weights of the largest are {weights / 1e6:.0f} MB, of all eight {packed / 1e6:.0f} MB",
    )
    assert alone >= weights
    assert each <= 24e6


def test_threads_share_what_sessions_keep_for_one(wide: Bundle, results: Results) -> None:
    """ONNX Runtime keeps graphs, handles and workspaces for every thread that runs a session: it is always the same."""
    engine = wide.manifest.engines[-1].id
    one, eight = memory(wide, [engine]), memory(wide, [engine], NESTFORGE_THREADS="8")
    more = f"{(eight - one) / 1e6:.1f} MB more"
    results.add("memory of an engine that eight threads run, over one", more, "0 MB", "one run each")
    assert eight - one <= 2**20
