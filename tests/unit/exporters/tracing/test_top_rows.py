"""The highest scores of rows of any length, as one TopK of a graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.exporters.tracing.top_rows import top_places
from nestforge.exporters.tracing.trace import trace


class Third(torch.nn.Module):
    """The highest third of each row, and at least one."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return top_places(scores, (scores.shape[1] + 2) // 3)


class Interface:
    inputs = (TensorSpec("scores", "float32", ("batch", "sequence")),)
    outputs = (TensorSpec("places", "int64", ("batch", "third")),)


def test_as_many_as_the_graph_counts_itself() -> None:
    traced = trace(Third(), Interface(), Bucket(1, 32, None, 1), opset=20)
    session = onnxruntime.InferenceSession(ir.to_proto(traced.model).SerializeToString())
    for length in (1, 2, 3, 10, 32):
        scores = np.random.default_rng(length).standard_normal((1, length)).astype(np.float32)
        (found,) = session.run(None, {"scores": scores})
        assert found.tolist() == [np.argsort(-scores[0])[: -(-length // 3)].tolist()]
