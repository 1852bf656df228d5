from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.errors import InputError
from nestforge.runtime.exits.batch_plan import BatchPlan
from nestforge.runtime.exits.host_workspace import HostWorkspace
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
    origin, source = workspace.keep(positions, plan(rows, old), target, 1)

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
    origin, source = workspace.keep(np.array([0, 2, 3, 6, 7]), plan(8, 8), plan(5, 8), 0)
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
