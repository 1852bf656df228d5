"""Files with and without the base model's prefix, and with older names."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint, TensorHeader
from nestforge.exporters.hugging_face.tensor_names import parameter_names


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
