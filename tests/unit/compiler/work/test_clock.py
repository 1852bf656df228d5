from __future__ import annotations

import pytest
from nestforge.compiler.work.clock import Clock
from nestforge.progress import Bytes, silent, tell


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
