"""The clock of a compile, and memory that it gives back."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from nestforge.compiler.work.clock import Clock
from nestforge.compiler.work.release_memory import release_memory
from nestforge.progress import Bytes, silent, tell
from nestforge.runtime.engines.onnxruntime.session import OPTIMIZATION_LEVEL, session_options


def test_progress_names_the_stage_and_its_parts() -> None:
    events: list[tuple[str, int, int]] = []
    clock = Clock(lambda *event: events.append(event))
    with clock("load"):
        pass
    with clock("build"):
        assert list(clock.each(["a", "b"])) == ["a", "b"]
    assert events == [
        ("load", 0, 1),
        ("load", 1, 1),
        ("build", 0, 1),
        ("build", 0, 2),
        ("build", 1, 2),
        ("build", 1, 1),
    ]
    assert list(clock.seconds) == ["load", "build"]
    assert all(value >= 0 for value in clock.seconds.values())


def test_what_a_long_part_tells_is_a_share_of_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, float, int]] = []
    clock, now = Clock(lambda *event: events.append(event)), [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    tell(1, 2)  # nobody listens
    with clock("build"):
        for _ in clock.each("ab"):
            now[0] += 1
            tell(1, 4)
            tell(2, 4)  # too soon
            tell(Bytes(4), Bytes(4))  # the next part says so
    with clock("store"):
        now[0] += 1
        tell(Bytes(2), Bytes(8))
    with clock("generate"):
        for _ in clock.each("a"):
            now[0] += 1
            tell(Bytes(2), Bytes(8))  # of what is no stage of bytes
    assert events[-2:] == [("generate", 0.25, 1), ("generate", 1, 1)]
    del events[-4:]
    assert events[:2] + events[-2:] == [("build", 0, 1), ("build", 0, 2), ("store", 2, 8), ("store", 1, 1)]
    assert events[2:-3] == [("build", 0.25, 2), ("build", 1, 2), ("build", 1.25, 2), ("build", 1, 1)]
    assert [type(total) for _, _, total in events].count(Bytes) == 1


def test_work_is_reported_before_it_is_done() -> None:
    done: list[str] = []
    reported: list[list[str]] = []
    clock = Clock(lambda *_: reported.append(done.copy()))
    for item in clock.each("ab"):
        done.append(item)
    assert reported == [[], ["a"]]


def test_cpu_seconds_are_those_of_the_processor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, wall = iter([1.0, 3.5]), iter([10.0, 11.0])
    monkeypatch.setattr("time.process_time", lambda: next(cpu))
    monkeypatch.setattr("time.perf_counter", lambda: next(wall))
    clock = Clock(silent)
    with clock("load"):
        pass
    assert (clock.seconds, clock.cpu_seconds) == ({"load": 1.0}, {"load": 2.5})


def test_a_stage_that_fails_leaves_no_time_and_passes_the_error_on() -> None:
    clock = Clock(silent)
    with pytest.raises(KeyError), clock("load"):
        raise KeyError
    assert clock.seconds == {}


def test_a_listener_may_stop_the_work() -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    worked = []
    with pytest.raises(KeyboardInterrupt):
        worked.extend(Clock(stop).each("abc"))
    assert worked == ["a"]


def test_the_arena_keeps_nothing_of_a_large_run() -> None:
    sizes = onnx.helper.make_tensor_value_info("sizes", onnx.TensorProto.INT64, [1])
    one, found = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []) for name in ("one", "found"))
    nodes = [
        onnx.helper.make_node("Expand", ["one", "sizes"], ["many"]),
        onnx.helper.make_node("ReduceSum", ["many"], ["found"], keepdims=0),
    ]
    graph = onnx.helper.make_graph(nodes, "large", [one, sizes], [found])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), session_options(1, OPTIMIZATION_LEVEL, packed=False)
    )
    release_memory()
    before = _anonymous()
    for many in (2**24, 2**25):  # 64 and 128 MB
        session.run(None, {"one": np.ones((), np.float32), "sizes": np.array([many])})
    held = _anonymous()
    release_memory()
    assert held - before > 128e6
    assert _anonymous() - before < 64e6
    assert session.run(None, {"one": np.ones((), np.float32), "sizes": np.array([8])}) == [8]


def _anonymous() -> int:
    """Bytes of memory that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
