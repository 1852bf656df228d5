from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.errors import SelectionError
from nestforge.runtime.exits.policy import ExitPolicy, check_count, closed, thresholds_for

ENTROPIES = np.array([0.0, 0.25, 0.3, np.nan], np.float32).tolist()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (ExitPolicy((0.25,)), [True, True, False, False]),
        (ExitPolicy((0.25,), "<"), [True, False, False, False]),
        (ExitPolicy((float(np.float32(0.3)),)), [True, True, True, False]),
        (ExitPolicy((0.3,)), [True, True, True, False]),  # 0.3 as float32, which the entropy is
        (ExitPolicy((-1.0,)), [False, False, False, False]),
        (ExitPolicy((1e300,)), [True, True, True, False]),
        (ExitPolicy((-1e300,)), [False, False, False, False]),
        (ExitPolicy((0.3,), rule="batch_max"), [False, False, False, False]),
    ],
    ids=["<=", "<", "float32", "decimal", "closed", "huge", "hugely negative", "batch max"],
)
def test_who_leaves(policy: ExitPolicy, expected: list[bool]) -> None:
    assert policy.leavers(0, ENTROPIES) == expected


def test_closed_never_lets_a_row_out() -> None:
    assert closed(3).thresholds == (-1.0, -1.0)
    assert not any(closed(3).leavers(1, ENTROPIES))
    assert closed(1).thresholds == ()


@pytest.mark.parametrize(
    ("asked", "exits", "expected"),
    [
        (0.5, 3, (0.5, 0.5)),
        (1, 2, (1.0,)),
        (np.float32(0.5), 3, (0.5, 0.5)),
        ([0.1, 2], 3, (0.1, 2.0)),
        ((), 1, ()),
        (0.5, 1, ()),
        ((float("inf"), -float("inf")), 3, (float("inf"), -float("inf"))),
    ],
)
def test_one_threshold_for_all_or_one_for_each(asked: Any, exits: int, expected: tuple[float, ...]) -> None:
    found = thresholds_for(asked, exits)
    assert found == expected
    assert all(type(value) is float for value in found)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([0.1], "thresholds: expected one number, or 2 (one for every exit but the last), got 1"),
        ([0.1, 0.2, 0.3], "thresholds: expected one number, or 2 (one for every exit but the last), got 3"),
        ([0.1, float("nan")], "thresholds: expected numbers in nats, got nan"),
        ([True, 0.1], "thresholds: expected numbers in nats, got True"),
        (["0.1", "0.2"], "thresholds: expected numbers in nats, got '0.1'"),
        (None, "thresholds: expected numbers in nats, got None"),
        ([10**400, 0.1], f"thresholds: expected numbers in nats, got 1{79 * '0'}"),
    ],
)
def test_refuses_thresholds(asked: Any, message: str) -> None:
    with pytest.raises(SelectionError) as error:
        thresholds_for(asked, 3)
    assert str(error.value) == message


def test_refuses_what_is_no_policy() -> None:
    with pytest.raises(
        SelectionError, match="expected a comparison of <, <= and a rule of per_row, batch_max, got '>'"
    ):
        ExitPolicy((0.1,), ">")  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match="got '<=' and 'mean'"):
        ExitPolicy((0.1,), rule="mean")  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match=r"got 1$"):
        check_count((0.1,), 3)


@given(entropy=st.floats(0, 3, width=32), compare=st.sampled_from(["<", "<="]))
def test_a_threshold_that_is_an_entropy_equals_it(entropy: float, compare: Any) -> None:
    assert ExitPolicy((entropy,), compare).leavers(0, [entropy]) == [compare == "<="]
