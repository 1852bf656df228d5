"""Scaled-dot-product attention as the operations that an engine runs, with every shape known.

torchlib's own translation folds and unfolds the keys by shapes that it computes, scales queries and keys apart, and
guards the probabilities against NaN, which its finite mask rules out.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import onnx_ir as ir
from onnxscript import opset20 as op
from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention


def attention_to_onnx(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The translation of ``aten.scaled_dot_product_attention`` on ``[B, heads, S, D]``; torchlib's where positions mask
    themselves, heads share keys, or there are other dimensions."""
    rank = None if key.shape is None else len(key.shape)
    width = None if query.shape is None else query.shape[-1]
    if is_causal or enable_gqa or dropout_p or rank != 4 or not isinstance(width, int):
        return aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scaled = op.Mul(query, _number(1 / sqrt(width) if scale is None else scale, query.dtype))
    scores = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))
    if attn_mask is not None:
        mask = attn_mask
        if mask.dtype == ir.DataType.BOOL:
            mask = op.Where(mask, _number(0.0, query.dtype), _number(query.dtype.min, query.dtype))
        scores = op.Add(scores, mask)
    return op.MatMul(op.Softmax(scores, axis=-1), value)


def _number(number: float, dtype: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(number, dtype=dtype))
