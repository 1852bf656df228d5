from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.errors import InputError
from nestforge.runtime.exits import workspace as module
from nestforge.runtime.exits.segments import BatchPlan
from nestforge.runtime.exits.workspace import HostWorkspace, Move, Step, Steps, side_by_side, to_front
from support.exit_bundles import HIDDEN, exits_entry


def plan(rows: int, sequence: int) -> BatchPlan:
    return BatchPlan((Bucket(rows, sequence),), 1.0)


def states(workspace: HostWorkspace, source: int, rows: int, sequence: int) -> np.ndarray:
    return workspace._states[source][: rows * sequence * HIDDEN].reshape(rows, sequence, HIDDEN)


def mask_of(workspace: HostWorkspace, rows: int, sequence: int) -> np.ndarray:
    return workspace._buffers["attention_mask"][: rows * sequence].reshape(rows, sequence)


@given(
    data=st.data(),
    rows=st.integers(1, 8),
    old=st.sampled_from([4, 8]),
    new=st.sampled_from([4, 8]),
    spare=st.integers(0, 4),
)
def test_what_is_kept_comes_first_and_the_rest_counts_for_nothing(
    data: st.DataObject, rows: int, old: int, new: int, spare: int
) -> None:
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1))))
    workspace = HostWorkspace(exits_entry(), 16, 8)
    for source in (0, 1):
        workspace._states[source][:] = np.nan
    workspace._buffers["attention_mask"][:] = 9
    before = np.arange(rows * old * HIDDEN, dtype=np.float32).reshape(rows, old, HIDDEN)
    states(workspace, 1, rows, old)[:] = before
    masks = np.arange(rows * old).reshape(rows, old) % 2
    mask_of(workspace, rows, old)[:] = masks

    count = len(positions)
    target = plan(count + spare, new)
    origin, source = workspace.compact(positions, plan(rows, old), target, 1)

    assert sorted(origin.tolist()) == positions.tolist()
    steps = min(old, new)
    state, mask = states(workspace, source, target.rows, new), mask_of(workspace, target.rows, new)
    assert np.array_equal(state[:count, :steps], before[origin, :steps])
    assert np.array_equal(mask[:count, :steps], masks[origin, :steps])
    assert not state[:count, steps:].any()
    assert not mask[:count, steps:].any()
    assert np.isfinite(state).all()
    assert mask.max() <= 1
    if new != old:
        assert source == 0
        assert not state[count:].any()
        assert not mask[count:].any()


def test_rows_already_in_front_stay_where_they_are() -> None:
    workspace = HostWorkspace(exits_entry(), 16, 8)
    workspace._states[0][:] = 0
    workspace._buffers["attention_mask"][:] = 0
    origin, source = workspace.compact(np.array([0, 2, 3, 6, 7]), plan(8, 8), plan(5, 8), 0)
    assert origin.tolist() == [0, 6, 2, 3, 7]
    assert source == 0


def test_inputs_are_cut_or_padded_and_spare_rows_are_empty() -> None:
    workspace = HostWorkspace(exits_entry(), 16, 16)
    for buffer in workspace._buffers.values():
        buffer[:] = 7
    feeds = {"input_ids": np.full((2, 8), 5), "attention_mask": np.ones((2, 8), np.int64)}
    workspace.fill(feeds, plan(4, 4))
    assert mask_of(workspace, 4, 4).tolist() == [[1] * 4] * 2 + [[0] * 4] * 2
    workspace.fill(feeds, plan(3, 16))
    assert mask_of(workspace, 3, 16).tolist() == [[1] * 8 + [0] * 8] * 2 + [[0] * 16]
    assert workspace._buffers["input_ids"][:16].tolist() == [5] * 8 + [0] * 8


def test_an_input_without_padding_must_have_the_steps() -> None:
    entry = exits_entry()
    first = entry.segments[0]
    unpadded = tuple(replace(spec, pad=None) for spec in first.inputs)
    entry = replace(entry, segments=(replace(first, inputs=unpadded), *entry.segments[1:]))
    workspace = HostWorkspace(entry, 4, 8)
    feeds = {"input_ids": np.full((2, 4), 5), "attention_mask": np.ones((2, 4), np.int64)}
    workspace.fill(feeds, plan(2, 4))
    with pytest.raises(
        InputError, match=r"input input_ids: cannot be padded, and shape \[2, 4\] has not the bucket's 8"
    ):
        workspace.fill(feeds, plan(2, 8))


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


@given(st.sets(st.integers(0, 40), min_size=1).map(sorted))
def test_rows_come_to_the_front_and_those_there_stay(positions: list[int]) -> None:
    origin, moves = to_front(positions)
    count = len(positions)
    assert sorted(origin) == positions
    assert all(origin[place] == place for place in positions if place < count)
    rows = list(range(41))
    for target, source, number in moves:
        assert target + number <= count <= source  # no copy overlaps another
        rows[target : target + number] = rows[source : source + number]
    assert rows[:count] == origin


def test_rows_that_lie_together_go_in_one_copy() -> None:
    assert to_front([0, 4, 5, 6]) == ([0, 4, 5, 6], [Move(1, 4, 3)])
    assert to_front([1, 6, 8, 9]) == ([6, 1, 8, 9], [Move(0, 6, 1), Move(2, 8, 2)])
    assert to_front([0, 1, 2]) == ([0, 1, 2], [])
    assert side_by_side(range(5), [0, 1, 4, 5, 6]) == [Move(0, 0, 2), Move(2, 4, 3)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_moves_are_the_pairs_in_order(pairs: list[tuple[int, int]]) -> None:
    moves = side_by_side([target for target, _ in pairs], [source for _, source in pairs])
    assert [(t + n, s + n) for t, s, count in moves for n in range(count)] == pairs
