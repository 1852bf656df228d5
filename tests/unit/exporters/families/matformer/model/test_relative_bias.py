from __future__ import annotations

import pytest
import torch
from nestforge.exporters.families.matformer.model import RelativeBias, distance_buckets
from transformers.models.t5.modeling_t5 import T5Attention


def _t5_bucket(relative: torch.Tensor) -> torch.Tensor:
    """The oracle: T5's own rule, of keys' places relative to their query."""
    found: torch.Tensor = T5Attention._relative_position_bucket(relative, bidirectional=False, num_buckets=32)
    return found


@pytest.mark.parametrize("length", [1, 2, 40, 200])
def test_buckets_of_every_query_and_key(length: int) -> None:
    place = torch.arange(length)
    expected = _t5_bucket(place[None, :] - place[:, None])
    assert torch.equal(distance_buckets(length, torch.device("cpu")), expected)


def test_the_first_heads_have_the_first_rows() -> None:
    bias, buckets = RelativeBias(4), distance_buckets(40, torch.device("cpu"))
    bias.weight.data = torch.randn(4, 32)
    assert torch.equal(bias(buckets), bias.weight.data[:, buckets])
    assert torch.equal(bias(buckets, 3), bias(buckets)[:3])
