"""Work in processes gives what it gives in this one, and one thread lasts as long as its block."""

from __future__ import annotations

import pytest
import torch
from nestforge.tools.train.side_by_side import one_thread, side_by_side


def test_one_thread_gives_the_others_back() -> None:
    threads = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


def inverse(number: int) -> float:
    return 1 / number


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_run_is_done_once_and_a_failure_is_told(jobs: int) -> None:
    found: dict[int, float] = {}
    side_by_side(inverse, [1, 2, 4], jobs, found.__setitem__)
    assert found == {1: 1.0, 2: 0.5, 4: 0.25}
    with pytest.raises(ZeroDivisionError):
        side_by_side(inverse, [2, 0], jobs, found.__setitem__)
