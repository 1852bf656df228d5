from __future__ import annotations

import pytest
import torch
from nestforge.exporters.modules.additive_mask import additive_mask


@pytest.mark.parametrize(
    ("dtype", "lowest"),
    [
        (torch.float16, torch.finfo(torch.float16).min),
        (torch.float32, torch.finfo(torch.float32).min),
        (torch.float64, torch.finfo(torch.float32).min),
    ],
)
def test_hidden_keys_have_the_lowest_finite_number(dtype: torch.dtype, lowest: float) -> None:
    mask = additive_mask(torch.tensor([[True, False], [False, False]]), torch.zeros(1, dtype=dtype))
    assert mask.dtype == dtype
    assert mask.tolist() == [[0.0, lowest], [lowest, lowest]]


def test_a_query_that_sees_nothing_gets_the_mean_of_all_values() -> None:
    scores = torch.tensor([[3.0, -40.0, 7.5]])
    hidden = scores + additive_mask(torch.zeros(1, 3, dtype=torch.bool), scores)
    assert hidden.softmax(-1).tolist() == [[pytest.approx(1 / 3)] * 3]
