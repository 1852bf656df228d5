"""The places of the highest scores in a traced graph, of as many tokens as the graph counts itself: one TopK."""

from __future__ import annotations

from typing import Any

import torch
from onnxscript import opset20 as op


@torch.library.custom_op("nestforge::top_places", mutates_args=())
def top_places(scores: torch.Tensor, count: int) -> torch.Tensor:
    """``scores`` [..., T] to [..., count] int64, by falling score. ``count`` is at most T, which a trace of rows of any
    length cannot see of torch's own operation."""
    return scores.topk(count, dim=-1).indices


@top_places.register_fake
def _(scores: torch.Tensor, count: int) -> torch.Tensor:
    return scores.new_empty((*scores.shape[:-1], count), dtype=torch.int64)


def top_places_to_onnx(scores: Any, count: Any) -> Any:
    """The translation of ``top_places``."""
    one = op.Constant(value_ints=[1])
    _, places = op.TopK(scores, op.Reshape(count, one))
    return places
