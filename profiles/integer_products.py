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


def qgemm(x: str, weight: str, y: str) -> list[onnx.NodeProto]:
    """``y = x weight^T`` of uint8 activations, scaled by their own extremes, and weights of 8 bits."""
    from onnx import helper

    scaled = [f"{y}.integers", f"{y}.scale", f"{y}.zero"]
    return [
        helper.make_node("DynamicQuantizeLinear", [x], scaled),
        helper.make_node("QGemm", [*scaled, *_names(weight, "zero")], [y], domain=DOMAIN, transB=1),
    ]


def qgemm_constants(name: str, weight: npt.NDArray[np.float32]) -> Constants:
    """int8 ``[n, k]``, and a scale and a zero point for each output."""
    scale = np.abs(weight).max(axis=1) / 127
    integers = np.rint(weight / scale[:, None]).astype(np.int8)
    return dict(zip(_names(name, "zero"), (integers, scale, np.zeros(len(weight), np.int8)), strict=True))


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
