from __future__ import annotations

import pytest
import torch
from nestforge.exporters.families.sparse_mixer.model import attention_mask
from nestforge.exporters.modules.attention import NestedAttention

IDS = torch.tensor([[5, 9, 7, 7], [9, 3, 7, 9]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_query_sees_a_key_where_neither_is_a_pad(dtype: torch.dtype) -> None:
    mask = attention_mask(IDS, 7, torch.zeros(1, dtype=dtype))
    assert mask.dtype == dtype
    assert mask.isfinite().all()
    assert (mask == 0)[0, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert (mask == 0)[1, 0].int().tolist() == [[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]]
    assert set(mask.unique().tolist()) == {0.0, max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)}


def test_a_pad_gets_the_mean_of_all_values_whatever_the_scores() -> None:
    torch.manual_seed(0)
    attention = NestedAttention(8, 2, 4, bias=True).requires_grad_(False)
    x = 30 * torch.randn(2, 4, 8)
    answer = attention(x, attention_mask(IDS, 7, x))
    mean = attention.output(attention.value(x).mean(1))
    torch.testing.assert_close(answer[0, 2], mean[0])
    torch.testing.assert_close(answer[0, 3], mean[0])
    torch.testing.assert_close(answer[1, 2], mean[1])
    assert not torch.allclose(answer[0, 0], mean[0])
