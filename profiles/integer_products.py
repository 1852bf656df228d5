"""Products with integer weights as an engine for a CPU has them, as nodes of ONNX and the constants that they read.

Weights are ``[n, k]`` float32 here, and become what the kernels read; compiler/graph/precision/cpu_kernels.py says why
these kernels, and in this way. Nothing of it is imported: a profile is made on devices without a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import onnx

Constants = Mapping[str, npt.NDArray[Any]]

DOMAIN = "com.microsoft"
_BLOCK_VALUES = 32
_ACCURACY_INT8_SUMS = 4  # activations become int8, so that the sums are of integers
_ROUNDING = ("step", "middle", "last")  # of activations: the scale, the integer of 0, and the axis of a row


def qgemm(x: str, weight: str, y: str) -> list[onnx.NodeProto]:
    """``y = x weight^T`` of uint8 activations, by one constant scale, and weights of 8 bits."""
    from onnx import helper

    *weights, step, middle, _ = _names(weight, "zero", *_ROUNDING)
    quantised = [f"{y}.integers", step, middle]
    return [
        helper.make_node("QuantizeLinear", [x, step, middle], quantised[:1]),
        helper.make_node("QGemm", [*quantised, *weights], [y], domain=DOMAIN, transB=1),
    ]


def qgemm_of_rows(x: str, weight: str, y: str) -> list[onnx.NodeProto]:
    """As ``qgemm``, in units of the largest magnitude of each row of activations, so that these have scales of their
    own."""
    from onnx import helper

    sizes, largest, units, sums = (f"{y}.{part}" for part in ("sizes", "largest", "units", "sums"))
    return [
        helper.make_node("Abs", [x], [sizes]),
        helper.make_node("ReduceMax", [sizes, _names(weight, *_ROUNDING)[-1]], [largest]),
        helper.make_node("Div", [x, largest], [units]),
        *qgemm(units, weight, sums),
        helper.make_node("Mul", [sums, largest], [y]),
    ]


def qgemm_constants(name: str, weight: npt.NDArray[np.float32], largest: float) -> Constants:
    """int8 ``[n, k]``, and a scale and a zero point for each output; and what rounds activations, of which ``largest``
    becomes 127."""
    scale = np.abs(weight).max(axis=1) / 127
    integers = np.rint(weight / scale[:, None]).astype(np.int8)
    rounding = (np.array(largest / 127, np.float32), np.array(128, np.uint8), np.array([-1], np.int64))
    values = (integers, scale, np.zeros(len(weight), np.int8), *rounding)
    return dict(zip(_names(name, "zero", *_ROUNDING), values, strict=True))


def matmul_nbits(x: str, weight: str, y: str, shape: tuple[int, ...]) -> list[onnx.NodeProto]:
    """``y = x weight^T`` of weights ``[n, k]`` of 4 bits; ``k`` is a multiple of the block of 32."""
    from onnx import helper

    outputs, inputs = shape
    node = helper.make_node("MatMulNBits", [x, *_names(weight)], [y], domain=DOMAIN, K=inputs, N=outputs)
    how = {"bits": 4, "block_size": _BLOCK_VALUES, "accuracy_level": _ACCURACY_INT8_SUMS}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in how.items())
    return [node]


def matmul_nbits_constants(name: str, weight: npt.NDArray[np.float32]) -> Constants:
    """uint8 ``[n, k / 32, 16]``, two weights a byte, the first in the low half; and a scale for each block."""
    blocks = weight.reshape(len(weight), -1, _BLOCK_VALUES)
    scale = np.abs(blocks).max(axis=2) / 7
    integers = (np.rint(blocks / scale[:, :, None]) + 8).astype(np.uint8)
    return dict(zip(_names(name), (integers[..., ::2] | integers[..., 1::2] << 4, scale), strict=True))


def _names(weight: str, *more: str) -> list[str]:
    return [f"{weight}.{part}" for part in ("integers", "scale", *more)]
