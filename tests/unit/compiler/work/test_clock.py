from __future__ import annotations

import pytest
from nestforge.compiler.work.clock import Clock
from nestforge.progress import silent


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
