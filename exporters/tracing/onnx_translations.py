"""ONNX forms of the torch operations that torch.onnx has none for, and of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset20 as op

from .add_rows import add_rows_to_onnx
from .attention import attention_to_onnx
from .top_rows import top_places_to_onnx

# Giles (2010), "Approximating the erfinv function": polynomials in w = -log(1 - y^2), by descending power; the first
# for w < 5 in w - 2.5, the second for larger w in sqrt(w) - 3. Relative error below 4e-7, as float32 can hold.
_ERFINV_CENTRE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_ERFINV_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def erf_inv(y: Any) -> Any:
    """The inverse error function of float32 ``-1 < y < 1``, elementwise."""
    w = op.Neg(op.Log(op.Mul(op.Sub(_constant(1.0), y), op.Add(_constant(1.0), y))))
    centre = _polynomial(_ERFINV_CENTRE, op.Sub(w, _constant(2.5)))
    tail = _polynomial(_ERFINV_TAIL, op.Sub(op.Sqrt(w), _constant(3.0)))
    return op.Mul(y, op.Where(op.Less(w, _constant(5.0)), centre, tail))


def _polynomial(coefficients: tuple[float, ...], x: Any) -> Any:
    total = _constant(coefficients[0])
    for coefficient in coefficients[1:]:
        total = op.Add(op.Mul(total, x), _constant(coefficient))
    return total


def _constant(value: float) -> Any:
    return op.Constant(value_float=value)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: attention_to_onnx,
    torch.ops.prims.erf_inv.default: erf_inv,
    torch.ops.nestforge.add_rows.default: add_rows_to_onnx,
    torch.ops.nestforge.top_places.default: top_places_to_onnx,
}
