"""Work in processes gives what it gives in this one, and one thread lasts as long as its block."""

from __future__ import annotations

import math

import pytest
import torch
from nestforge.examples.train.side_by_side import one_thread, side_by_side


def test_one_thread_gives_the_others_back() -> None:
    threads = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_run_is_done_once_and_a_failure_is_raised(jobs: int) -> None:
    """The work is a function of a module without torch, which processes would import for seconds."""
    found: dict[int, float] = {}
    side_by_side(math.sqrt, [1, 4, 16], jobs, found.__setitem__)
    assert found == {1: 1.0, 4: 2.0, 16: 4.0}
    with pytest.raises(ValueError, match="math domain error"):
        side_by_side(math.sqrt, [4, -1], jobs, found.__setitem__)
