"""``answer[rows] += values`` as one operation, which an engine computes with a plain ScatterND: rows do not meet."""

from __future__ import annotations

from typing import Any

import torch
from onnxscript import opset20 as op


@torch.library.custom_op("nestforge::add_rows", mutates_args=())
def add_rows(answer: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A copy of ``answer`` [M, d] with ``values`` [N, d] added to its ``rows`` [N], which are distinct."""
    return answer.index_put((rows,), answer[rows] + values)


@add_rows.register_fake
def _(answer: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG001  (shapes alone)
    return torch.empty_like(answer)


def add_rows_to_onnx(answer: Any, rows: Any, values: Any) -> Any:
    """The translation of ``add_rows``."""
    places = op.Unsqueeze(rows, op.Constant(value_ints=[-1]))  # [N, 1]
    return op.ScatterND(answer, places, op.Add(op.GatherND(answer, places), values))
