"""What engines on the CUDA provider take of the GPU's memory, by cudaMemGetInfo, each case in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu_here import Results
from nestforge.runtime.bundle import Bundle

PROGRAM = Path(__file__).resolve().parents[1] / "gpu_memory.py"
# cuBLAS keeps a workspace per session, up to 32 MB on Hopper, whatever the engines; here it keeps 16 kB.
ENVIRONMENT = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":16:1"}


def memory(bundle: Bundle, *engines: str) -> int:
    command = [sys.executable, str(PROGRAM), str(bundle.path), *engines]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    return int(done.stdout)


def test_eight_submodels_take_little_more_than_the_largest(wide: Bundle, results: Results) -> None:
    engines = {engine.submodel: engine.id for engine in wide.manifest.engines}
    assert len(engines) == 8
    largest = max(wide.manifest.submodels, key=lambda entry: entry.weight_bytes).id
    alone, together = memory(wide, engines[largest]), memory(wide, *engines.values())
    weights = wide.manifest.submodel(largest).weight_bytes
    results.add(
        "memory of eight submodels against the largest alone",
        f"{together / alone:.3f}x ({together / 1e6:.0f} against {alone / 1e6:.0f} MB)",
        "<= 1.15x",
        f"its weights are {weights / 1e6:.0f} MB; cuBLAS keeps no workspace",
    )
    assert alone >= weights
    assert together <= 1.15 * alone
