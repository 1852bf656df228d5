"""Threads of a session: how many there are, where they run, and that they sleep while there is nothing to do."""

import os
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import Any

import nestforge
import numpy as np
import onnxruntime
import pytest
from nestforge.errors import BundleCorruptError, BundleError, BundleIncompatibleError
from nestforge.runtime.engines.onnxruntime import session as module
from nestforge.runtime.engines.onnxruntime.session import (
    OPTIMIZATION_LEVEL,
    open_error,
    open_session,
    session_options,
    use_shared_arena,
)
from onnx import TensorProto, helper

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="reads threads from Linux's /proc")

TASKS = Path("/proc/self/task")
CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def opened(path: Path, options: Any) -> tuple[Any, list[Path]]:
    """A session and the threads that it started."""
    before = set(TASKS.iterdir())
    session = open_session(path.absolute(), options)
    return session, sorted(set(TASKS.iterdir()) - before, key=lambda task: int(task.name))


def placed(tasks: Sequence[Path], expected: Sequence[int]) -> list[str]:
    """Where each may run, once that is as expected: a thread places itself, a while after the session is open."""
    for _ in range(200):
        lines = [dict(line.split(":", 1) for line in (t / "status").read_text().splitlines()) for t in tasks]
        found = [each["Cpus_allowed_list"].strip() for each in lines]
        if found == [str(cpu) for cpu in expected]:
            break
        sleep(0.01)
    return found


def cpu_ms(task: Path) -> float:
    return int((task / "schedstat").read_text().split()[0]) / 1e6


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_session_starts_one_thread_fewer_than_it_computes_on(tiny_bundle: Path, threads: int) -> None:
    _session, tasks = opened(tiny_bundle / "ffn16.b1-s8.onnx", session_options(threads, OPTIMIZATION_LEVEL, True))
    assert len(tasks) == threads - 1


@pytest.mark.parametrize("affinity", [CPUS[:1], CPUS[-1:], CPUS[:2], CPUS[1::-1]])
def test_threads_run_where_they_are_placed(tiny_bundle: Path, affinity: Sequence[int]) -> None:
    options = session_options(len(affinity) + 1, OPTIMIZATION_LEVEL, True, affinity)
    _session, tasks = opened(tiny_bundle / "ffn16.b1-s8.onnx", options)
    assert placed(tasks, affinity) == [str(cpu) for cpu in affinity]


@pytest.mark.skipif(len(CPUS) < 2, reason="a second thread needs a second CPU")
@pytest.mark.parametrize("residency", ["shared", "packed", "mapped"])
def test_a_model_is_placed_in_every_residency(
    tiny_bundle: Path, residency: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nestforge.load(tiny_bundle, threads=1, preload=True).close()  # what libraries start once is there now
    before = set(TASKS.iterdir())
    with nestforge.load(tiny_bundle, affinity=CPUS[-1:], residency=residency, preload=True) as model:
        tasks = sorted(set(TASKS.iterdir()) - before)
        expected = CPUS[-1:] * len(model.bundle.manifest.engines)
        assert model.threads == 2
        assert placed(tasks, expected) == [str(cpu) for cpu in expected]


def test_threads_sleep_while_nothing_runs(tiny_bundle: Path) -> None:
    path = tiny_bundle / "ffn16.b1-s8.onnx"
    options = session_options(2, OPTIMIZATION_LEVEL, True)
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    assert options.get_session_config_entry("session.intra_op.spin_duration_us") == "50"
    spinning = onnxruntime.SessionOptions()
    spinning.intra_op_num_threads = 2
    feeds = {name: np.ones((1, 8), np.int64) for name in ("input_ids", "attention_mask")}
    sessions = [opened(path, each) for each in (options, spinning)]
    for session, _ in sessions:
        session.run(None, feeds)
    sleep(0.1)
    ours, other = (cpu_ms(task) for _, [task] in sessions)  # since they were opened
    assert ours < 2
    assert other > ours


ENTRY = "session.use_env_allocators"


def test_sessions_take_activations_from_one_arena() -> None:
    options = onnxruntime.SessionOptions()
    use_shared_arena(options)
    assert options.get_session_config_entry(ENTRY) == "1"


def test_a_process_that_registers_none_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("registered already")

    monkeypatch.setattr(onnxruntime, "create_and_register_allocator", refuse)
    monkeypatch.setattr(module, "_registered", module._registered.__wrapped__)
    options = onnxruntime.SessionOptions()
    use_shared_arena(options)
    with pytest.raises(RuntimeError, match=ENTRY):
        options.get_session_config_entry(ENTRY)


def graph(ir_version: int) -> bytes:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    nodes = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(nodes, opset_imports=opset, ir_version=ir_version).SerializeToString()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"not a graph", BundleCorruptError),
        (graph(ir_version=99), BundleIncompatibleError),
        (None, BundleCorruptError),
    ],
    ids=["damaged", "of a later release", "missing"],
)
def test_what_onnx_runtime_raises_is_named_by_its_cause(
    tmp_path: Path, content: bytes | None, expected: type[BundleError]
) -> None:
    path = tmp_path / "g.onnx"
    if content is not None:
        path.write_bytes(content)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception) as failure:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    assert open_error(failure.value) is expected
