"""Attention as an engine computes it equals PyTorch's, whatever masks it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.exporters.signature import Signature
from nestforge.exporters.tracing.trace import trace
from torch.nn import functional

NAMES = ("query", "key", "value")
BUCKET = Bucket(3, 6, 2, 2)


class Attends(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: torch.Tensor) -> Any:
        chosen = (mask[0] > 0 if self.options.get("hides") else mask[0]) if mask else None
        options = {name: given for name, given in self.options.items() if name != "hides"}
        return (functional.scaled_dot_product_attention(query, key, value, chosen, **options),)


def spec(name: str, heads: int) -> TensorSpec:
    return TensorSpec(name, "float32", ("batch", heads, "sequence", 8))


@pytest.mark.parametrize("bucket", [Bucket(3, 6), BUCKET], ids=str)
@pytest.mark.parametrize(
    ("options", "masked", "heads", "plain"),
    [
        ({}, False, 4, True),
        ({"scale": 0.3}, True, 4, True),
        ({"hides": True}, True, 4, True),
        ({"is_causal": True}, False, 4, False),
        ({"enable_gqa": True}, False, 2, False),
    ],
    ids=["alone", "added mask", "mask of bools", "causal", "shared keys"],
)
def test_equals_pytorch(options: dict[str, Any], masked: bool, heads: int, plain: bool, bucket: Bucket) -> None:
    specs = [spec("query", 4), spec("key", heads), spec("value", heads)]
    if masked:
        specs.append(TensorSpec("mask", "float32", ("batch", 1, 1, "sequence")))
    signature = Signature(tuple(specs), (spec("out", 4),), 6)
    module = Attends(**options)
    traced = trace(module, signature, bucket, 20)
    kinds = [node.op_type for node in traced.model.graph]
    assert ("IsNaN" not in kinds and "Reshape" not in kinds) or not plain
    session = onnxruntime.InferenceSession(ir.to_proto(traced.model).SerializeToString())
    rng = np.random.default_rng(0)
    feeds = {each.name: rng.standard_normal(each.shape(bucket)).astype(np.float32) for each in specs}
    if options.get("hides"):
        feeds["mask"][..., 0] = 1.0  # every query sees something
    (expected,) = module(*map(torch.from_numpy, feeds.values()))
    (found,) = session.run(None, feeds)
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-6)
