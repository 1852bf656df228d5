"""The GPU's memory that engines on the CUDA provider take, by cudaMemGetInfo, each case in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from nestforge.bundle.open_bundle import Bundle
from support.gpu_available import Results

PROGRAM = Path(__file__).resolve().parents[1] / "support" / "gpu_memory.py"
# cuBLAS keeps a workspace per session, up to 32 MB on Hopper, whatever the engines; here it keeps 16 kB.
ENVIRONMENT = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":16:1"}


pytestmark = pytest.mark.needs_gpu


def memory(bundle: Bundle, engines: Iterable[str], **settings: str) -> int:
    command = [sys.executable, str(PROGRAM), str(bundle.path), *engines]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**ENVIRONMENT, **settings})
    return int(done.stdout)


def test_eight_submodels_take_little_more_than_the_largest(wide: Bundle, results: Results) -> None:
    engines = {engine.submodel: engine.id for engine in wide.manifest.engines}
    assert len(engines) == 8
    largest = max(wide.manifest.submodels, key=lambda entry: entry.weight_bytes).id
    weights = wide.manifest.submodel(largest).weight_bytes
    found = {}
    for how, settings in (("as they are opened", {}), ("without memory patterns", {"NESTFORGE_MEMORY_PATTERN": "0"})):
        alone, together = memory(wide, [engines[largest]], **settings), memory(wide, engines.values(), **settings)
        found[how] = alone, together
        results.add(
            f"memory of eight submodels against the largest alone, sessions {how}",
            f"{together / alone:.3f}x ({together / 1e6:.0f} against {alone / 1e6:.0f} MB)",
            "<= 1.15x",
            f"its weights are {weights / 1e6:.0f} MB; cuBLAS keeps no workspace",
        )
    alone, together = found["as they are opened"]
    assert alone >= weights
    assert together <= 1.15 * alone


def test_threads_share_what_sessions_keep_for_one(wide: Bundle, results: Results) -> None:
    """ONNX Runtime keeps graphs, handles and workspaces for every thread that runs a session: it is always the same."""
    engine = wide.manifest.engines[-1].id
    one, eight = memory(wide, [engine]), memory(wide, [engine], NESTFORGE_THREADS="8")
    more = f"{(eight - one) / 1e6:.1f} MB more"
    results.add("memory of an engine that eight threads run, over one", more, "0 MB", "one run each")
    assert eight - one <= 2**20
