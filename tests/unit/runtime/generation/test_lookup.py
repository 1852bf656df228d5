"""Tokens looked up in the text that they continue."""

from __future__ import annotations

import numpy as np
import pytest
from nestforge.runtime.generation.lookup import look_up


@pytest.mark.parametrize(
    ("tokens", "count", "found"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 6, [3, 4, 1, 2, 3, 4]),  # what is found reaches into itself
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, [6]),  # the last place of two
        ([9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], 1, [5]),  # three tokens alike before two
        ([7, 9, 1, 2, 5, 8, 9, 1, 2, 6, 7, 9, 1, 2], 1, [6]),  # beyond three the last place counts
        ([4, 4, 4], 3, [4, 4, 4]),
        ([4, 4], 3, []),  # one token alike
        ([1, 2, 3], 3, []),
        ([3], 3, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_what_followed_the_last_tokens_before(tokens: list[int], count: int, found: list[int]) -> None:
    assert look_up(np.array(tokens), count).tolist() == found
