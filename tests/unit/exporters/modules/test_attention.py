from __future__ import annotations

import pytest
import torch
from nestforge.exporters.modules.attention import additive_mask, causal_mask, rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_query_sees_keys_up_to_itself(dtype: torch.dtype) -> None:
    mask = causal_mask(4, torch.zeros(1, dtype=dtype))
    assert mask.dtype == dtype
    assert torch.equal(mask == 0, torch.ones(4, 4).tril().bool())
    assert mask.isfinite().all()
    assert (mask[mask != 0] < -1e38).all()


def test_scores_depend_on_the_distance_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=draw, dtype=torch.float64)

    def score(at: int, other: int) -> torch.Tensor:
        turned, against = (rotary(torch.tensor([place]), 8)(x) for place, x in ((at, query), (other, key)))
        return (turned * against).sum()

    torch.testing.assert_close(score(7, 3), score(5, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(score(0, 0), (query * key).sum(), rtol=0, atol=1e-12)
    assert abs(score(7, 3) - score(7, 2)) > 1e-3


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
