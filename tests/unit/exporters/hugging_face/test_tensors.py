"""Files with and without the base model's prefix, and with older names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint, TensorHeader
from nestforge.exporters.hugging_face.tensors import distance_bucket, parameter_names
from transformers.models.t5.modeling_t5 import T5Attention


def holding(*names: str) -> Checkpoint:
    return Checkpoint(Path("m"), {}, dict.fromkeys(names, TensorHeader((1,), "F32", "model.safetensors")))


@pytest.mark.parametrize(
    ("tensor", "parameters", "parameter"),
    [
        ("embed.weight", {"embed.weight"}, "embed.weight"),
        ("bert.embed.weight", {"embed.weight"}, "embed.weight"),
        ("embed.weight", {"bert.embed.weight"}, "bert.embed.weight"),
        ("bert.embed.weight", {"bert.embed.weight"}, "bert.embed.weight"),
        ("head.weight", {"embed.weight"}, "head.weight"),
        ("LayerNorm.gamma", {"bert.LayerNorm.weight"}, "bert.LayerNorm.weight"),
        ("bert.LayerNorm.beta", {"LayerNorm.bias"}, "LayerNorm.bias"),
        ("old.weight", {"new.weight"}, "new.weight"),
    ],
)
def test_a_tensor_is_found_by_its_parameter(tensor: str, parameters: set[str], parameter: str) -> None:
    assert parameter_names(holding(tensor), parameters, "bert", [("old", "new")]) == {parameter: tensor}


def test_two_tensors_of_one_parameter_are_refused() -> None:
    message = r"^m: tensors 'a' and 'bert.a' are both parameter a; keep one of them$"
    with pytest.raises(CheckpointError, match=message):
        parameter_names(holding("a", "bert.a"), {"a"}, "bert")


@pytest.mark.parametrize("buckets", [16, 32])
def test_distances_fall_into_the_buckets_of_t5(buckets: int) -> None:
    found = [distance_bucket(distance, buckets, reach=128) for distance in range(4000)]
    oracle = T5Attention._relative_position_bucket(-torch.arange(4000), bidirectional=False, num_buckets=buckets)
    assert found == oracle.tolist()
    half, last = buckets // 2, buckets - 1
    assert (found[half - 1], found[half], found[127], found[128], max(found)) == (half - 1, half, last, last, last)
