from __future__ import annotations

import numpy as np
import pytest
from nestforge.runtime.exits import steps as module
from nestforge.runtime.exits.steps import Step, Steps


class Call:
    def __init__(self) -> None:
        self.closed = 0

    def __call__(self) -> None: ...

    def close(self) -> None:
        self.closed += 1


def step_of(*calls: Call) -> Step:
    return Step(calls, np.empty((1, 2)), np.empty(1), None, calls)


def test_a_step_is_bound_once_and_closed_with_the_others() -> None:
    steps, calls = Steps(), [Call(), Call()]
    bound: list[str] = []

    def bind() -> Step:
        bound.append("bind")
        return step_of(*calls)

    assert steps.get("a", bind) is steps.get("a", bind)
    assert bound == ["bind"]
    steps.close()
    steps.close()
    assert [call.closed for call in calls] == [1, 1]
    steps.get("a", bind)
    assert bound == ["bind"] * 2


def test_a_step_beyond_the_bound_closes_the_one_that_was_asked_for_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BOUND_STEPS", 3)
    steps, calls = Steps(), [Call() for _ in range(5)]
    for number in (0, 1, 2, 0, 3, 4):
        steps.get(number, lambda call=calls[number]: step_of(call))
    assert [call.closed for call in calls] == [0, 1, 1, 0, 0]
