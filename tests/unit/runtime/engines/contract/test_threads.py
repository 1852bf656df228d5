"""The process-wide pool lasts as long as a process, so each test has one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from nestforge.errors import InputError
from nestforge.runtime.engines.contract.threads import process_wide_threads, threads_or_default

PROGRAM = """
import sys
import nestforge, onnxruntime, numpy as np
from nestforge.errors import InputError

def answer():
    ids = np.zeros((1, 8), np.int64)
    with nestforge.load(sys.argv[1]) as model:
        return model({"input_ids": ids, "attention_mask": ids + 1})["total"]

before = answer()
nestforge.use_process_wide_threads(2)
nestforge.use_process_wide_threads(2)
assert np.array_equal(before, answer())
try:
    nestforge.use_process_wide_threads(1)
except InputError as error:
    print(error)
options = onnxruntime.SessionOptions()
try:
    path = sys.argv[1] + "/ffn16.b1-s8.onnx"
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], enable_fallback=0)
except RuntimeError:
    print("ordinary session refused")
"""


def test_a_pool_for_the_whole_process(tiny_bundle: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tiny_bundle)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "process-wide threads: expected to set 1, but a pool is in force already (2 threads); "
        "set it once, before anything else does",
        "ordinary session refused",
    ]


def test_no_pool_unless_asked() -> None:
    assert process_wide_threads() is None


def test_threads_by_default_are_the_cores_of_this_process() -> None:
    assert threads_or_default(3) == 3
    assert threads_or_default(None) >= 1
    with pytest.raises(InputError, match="threads: expected at least 1, got -1"):
        threads_or_default(-1)
