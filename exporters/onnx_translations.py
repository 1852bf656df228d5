"""ONNX forms of the torch operations that torch.onnx has none for, or a wrong one, and of our own. Complex tensors are
real ones ``[..., 2]`` there: the real part of each number and its imaginary one."""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset20 as op
from onnxscript.function_libs.torch_lib.ops.common import merge_dims
from onnxscript.function_libs.torch_lib.ops.core import aten_mul_complex
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
    """The translation of ``aten.scaled_dot_product_attention`` on ``[B, heads, S, D]``; torchlib's where heads
    share keys, or there are other dimensions."""
    rank = None if key.shape is None else len(key.shape)
    width = None if query.shape is None else query.shape[-1]
    if enable_gqa or dropout_p or rank != 4 or not isinstance(width, int):
        return aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scaled = op.Mul(query, _number(1 / sqrt(width) if scale is None else scale, query.dtype))
    scores = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))
    if attn_mask is not None or is_causal:
        mask = _seen(query, key) if is_causal else attn_mask
        if is_causal or mask.dtype == ir.DataType.BOOL:
            mask = op.Where(mask, _number(0.0, query.dtype), _number(query.dtype.min, query.dtype))
        scores = op.Add(scores, mask)
    return op.MatMul(op.Softmax(scores, axis=-1), value)


def _seen(query: Any, key: Any) -> Any:
    """Bool ``[S, S]``: a position sees itself and those before it."""
    zero, one, axis = (op.Constant(value=ir.tensor(number, dtype=ir.DataType.INT64)) for number in (0, 1, [1]))
    places, seen = (op.Range(zero, op.Squeeze(op.Shape(x, start=2, end=3)), one) for x in (query, key))
    return op.LessOrEqual(seen, op.Unsqueeze(places, axis))


def _number(number: float, dtype: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(number, dtype=dtype))


def squeeze_to_onnx(x: Any, dim: int | Sequence[int]) -> Any:
    """The translation of ``aten.squeeze`` with dimensions, of which those that are not 1 stay; torchlib's is a Squeeze
    of them all."""
    axes = [axis for axis in ([dim] if isinstance(dim, int) else dim) if x.shape is None or x.shape[axis] == 1]
    return op.Squeeze(x, op.Constant(value_ints=axes)) if axes else op.Identity(x)


def rsub_to_onnx(x: Any, other: float, alpha: float = 1) -> Any:
    """The translation of ``aten.rsub`` from a number: torch makes a ``sub`` of it, which takes none there once
    an integer ``x`` is promoted."""
    dtype = ir.DataType.FLOAT if isinstance(other, float) and not x.dtype.is_floating_point() else x.dtype
    wide = x if dtype == x.dtype else op.Cast(x, to=dtype)
    return op.Sub(_number(other, dtype), wide if alpha == 1 else op.Mul(wide, _number(alpha, dtype)))


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


def table_rows(places: torch.Tensor, tokens: int) -> torch.Tensor:
    """``places`` [G, ...] in groups of ``tokens`` as rows of the table [G * T, d] of all, in the same shape."""
    groups = places.shape[0]
    if groups == 1:
        return places
    return places + tokens * torch.arange(groups, device=places.device).view(groups, *(1 for _ in places.shape[1:]))


def one_hot(places: torch.Tensor, tokens: int) -> torch.Tensor:
    """``places`` [G, C] to [G, C, T]: 1 where a place holds a token."""
    return (places[..., None] == torch.arange(tokens)).float()


def complex_product(x: Any, other: Any) -> Any:
    """The translation of ``aten.mul`` by another complex tensor, or by a real number."""
    if isinstance(other, (int, float)):
        return op.Mul(x, op.Constant(value=ir.tensor(float(other), dtype=ir.DataType.FLOAT)))
    return aten_mul_complex(x, other)


def complex_unsqueeze(x: Any, dim: int) -> Any:
    """The translation of ``aten.unsqueeze``."""
    return op.Unsqueeze(x, op.Constant(value_ints=[dim if dim >= 0 else dim - 1]))


def complex_expand(x: Any, size: Sequence[Any], implicit: bool = False) -> Any:  # noqa: ARG001  (as torch has it)
    """The translation of ``aten.expand``, for which -1 is a dimension as it is."""
    return op.Expand(x, merge_dims([*(1 if isinstance(dim, int) and dim == -1 else dim for dim in size), 2]))


def complex_copy(x: Any, **_: Any) -> Any:
    """The translation of ``aten._to_copy`` to complex numbers of the same size, whatever the device."""
    return op.Identity(x)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: attention_to_onnx,
    torch.ops.aten.rsub.Scalar: rsub_to_onnx,
    torch.ops.aten.squeeze.dim: squeeze_to_onnx,
    torch.ops.aten.squeeze.dims: squeeze_to_onnx,
    torch.ops.prims.erf_inv.default: erf_inv,
    torch.ops.nestforge.add_rows.default: add_rows_to_onnx,
    torch.ops.nestforge.top_places.default: top_places_to_onnx,
}
COMPLEX_TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.mul.Tensor: complex_product,
    torch.ops.aten.unsqueeze.default: complex_unsqueeze,
    torch.ops.aten.expand.default: complex_expand,
    torch.ops.aten._to_copy.default: complex_copy,
}
