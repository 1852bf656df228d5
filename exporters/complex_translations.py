"""ONNX forms of torch's operations on complex tensors, which are real tensors ``[..., 2]`` there: the real part of each
number and its imaginary one. Those that torch.onnx has no such form for, or a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset20 as op
from onnxscript.function_libs.torch_lib.ops.common import merge_dims
from onnxscript.function_libs.torch_lib.ops.core import aten_mul_complex


def product(x: Any, other: Any) -> Any:
    """The translation of ``aten.mul`` by another tensor, or by a real number."""
    if isinstance(other, (int, float)):
        return op.Mul(x, op.Constant(value=ir.tensor(float(other), dtype=ir.DataType.FLOAT)))
    return aten_mul_complex(x, other)


def unsqueeze(x: Any, dim: int) -> Any:
    """The translation of ``aten.unsqueeze``."""
    return op.Unsqueeze(x, op.Constant(value_ints=[dim if dim >= 0 else dim - 1]))


def expand(x: Any, size: Sequence[Any], implicit: bool = False) -> Any:  # noqa: ARG001  (as torch has it)
    """The translation of ``aten.expand``, for which -1 is a dimension as it is."""
    return op.Expand(x, merge_dims([*(1 if isinstance(dim, int) and dim == -1 else dim for dim in size), 2]))


def copied(x: Any, **_: Any) -> Any:
    """The translation of ``aten._to_copy`` to complex numbers of the same size, whatever the device."""
    return op.Identity(x)


COMPLEX_TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.mul.Tensor: product,
    torch.ops.aten.unsqueeze.default: unsqueeze,
    torch.ops.aten.expand.default: expand,
    torch.ops.aten._to_copy.default: copied,
}
