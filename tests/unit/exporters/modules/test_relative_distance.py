from __future__ import annotations

import pytest
import torch
from nestforge.exporters.modules.relative_distance import distance_bucket
from transformers.models.t5.modeling_t5 import T5Attention


@pytest.mark.parametrize("buckets", [16, 32])
def test_distances_fall_into_the_buckets_of_t5(buckets: int) -> None:
    found = [distance_bucket(distance, buckets, reach=128) for distance in range(4000)]
    oracle = T5Attention._relative_position_bucket(-torch.arange(4000), bidirectional=False, num_buckets=buckets)
    assert found == oracle.tolist()
    half, last = buckets // 2, buckets - 1
    assert (found[half - 1], found[half], found[127], found[128], max(found)) == (half - 1, half, last, last, last)
