"""Names and shapes are those of torch's own layers."""

from __future__ import annotations

import pytest
import torch
from nestforge.exporters.hugging_face.layer_shapes import linear_shapes, norm_shapes


def shapes_of(layer: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {f"layer.{name}": tuple(parameter.shape) for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer(bias: bool) -> None:
    assert linear_shapes("layer", 3, 5, bias) == shapes_of(torch.nn.Linear(3, 5, bias))


def test_a_layer_norm() -> None:
    assert norm_shapes("layer", 7) == shapes_of(torch.nn.LayerNorm(7))
