"""The process-wide pool lasts as long as a process, so each test has one of its own."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nestforge.errors import InputError
from nestforge.profiles.probe_host import probe_host
from nestforge.runtime.device.threads import threads_and_affinity, threads_or_default

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
try:
    nestforge.load(sys.argv[1], affinity=[0])
except InputError as error:
    print(error)
"""


def test_a_pool_for_the_whole_process(tiny_bundle: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tiny_bundle)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "process-wide threads: expected to set 1, but a pool is in force already (2 threads); "
        "set it once, before anything else does",
        "ordinary session refused",
        "affinity: expected none, since 2 process-wide threads are in force; use one of the two",
    ]


def test_threads_by_default_are_the_cores_of_this_process() -> None:
    assert threads_or_default(1) == 1
    assert threads_or_default(None) == probe_host().cores


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5}, raising=False)


@pytest.mark.parametrize("threads", [0, -1, 5, 1.0, True, "2"])
def test_threads_are_within_the_cpus_of_this_process(four_cpus: None, threads: Any) -> None:
    assert threads_or_default(4) == 4
    with pytest.raises(InputError) as error:
        threads_or_default(threads)
    assert str(error.value) == (
        f"threads: expected a whole number from 1 to 4, the CPUs that this process may use, got {threads!r}"
    )


def test_each_thread_but_the_callers_has_its_cpu(four_cpus: None) -> None:
    assert threads_and_affinity(3, None) == (3, ())
    assert threads_and_affinity(None, [5, 0]) == (3, (5, 0))
    assert threads_and_affinity(2, (4,)) == (2, (4,))


@pytest.mark.parametrize("affinity", [[], "1", "", [1, 1], [1.0], [True], ["1"], 1, {4: 1}.values])
def test_affinity_is_numbers_of_cpus(four_cpus: None, affinity: Any) -> None:
    with pytest.raises(InputError) as error:
        threads_and_affinity(None, affinity)
    assert str(error.value) == f"affinity: expected numbers of CPUs, each once, such as [1, 2], got {affinity!r}"


@pytest.mark.parametrize(
    ("threads", "affinity", "message"),
    [
        (None, [1, 2], "affinity: expected some of the CPUs that this process may use, 0, 1, 4, 5, got 2"),
        (None, [-1], "affinity: expected some of the CPUs that this process may use, 0, 1, 4, 5, got -1"),
        (3, [1], "affinity: expected 2 CPUs for 3 threads, one for each beside the calling thread, got 1"),
        (1, [1], "affinity: expected none for 1 thread, which is the calling one, got 1"),
        (None, [0, 1, 4, 5], "affinity: expected at most 3 CPUs, which with the calling thread's are all that this "
         "process may use, got 4"),
    ],
)  # fmt: skip
def test_affinity_fits_the_cpus_and_the_threads(
    four_cpus: None, threads: int | None, affinity: list[int], message: str
) -> None:
    with pytest.raises(InputError) as error:
        threads_and_affinity(threads, affinity)
    assert str(error.value) == message


def test_affinity_is_for_systems_that_place_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(InputError) as error:
        threads_and_affinity(None, [1])
    assert str(error.value) == "affinity: expected none on Darwin, where threads are not placed; leave it out"
    assert threads_and_affinity(1, None) == (1, ())
