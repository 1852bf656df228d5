"""The encodings in which a weight may be stored, and the bytes of each: one formula for plans and for the weight store.

An encoding is the suffix of a stored tensor's name; the empty one is float32. What the bytes are is said in
compiler/graph/encodings.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

Encoding = Literal["", ".fp16", ".bf16", ".int8", ".int8-scale", ".int8-zero", ".int4", ".int4-scale"]

FP32: Encoding = ""
FP16: Encoding = ".fp16"
BF16: Encoding = ".bf16"
INT8: Encoding = ".int8"  # symmetric: -63..63, zero point 0
INT8_SCALE: Encoding = ".int8-scale"  # float32
INT8_ZERO: Encoding = ".int8-zero"  # int8: the zero points, all 0, as many as scales, which kernels want beside them
INT4: Encoding = ".int4"  # [out, blocks, 16] uint8: 32 inputs a block, the even ones in the low halves, 8 for 0
INT4_SCALE: Encoding = ".int4-scale"  # [out, blocks] float32
ENCODINGS = (FP16, BF16, INT8, INT8_SCALE, INT8_ZERO, INT4, INT4_SCALE)
HALVES = (FP16, BF16)
INT4_BLOCK = 32
# Below these a product has no work that smaller numbers would save, and stays in float32; so does a table.
LEAST_INPUTS = 32
LEAST_OUTPUTS = 16


def encoded_shape(shape: Sequence[int], encoding: Encoding) -> tuple[int, ...]:
    """Extents of the encoded tensor of a weight ``[..., out, in]``; of a transposed one, which is stored as
    ``[in, out]``, those before it is transposed."""
    match encoding:
        case ".int8-scale" | ".int8-zero":
            return tuple(shape[:-1])
        case ".int4":
            return (*shape[:-1], _blocks(shape), INT4_BLOCK // 2)
        case ".int4-scale":
            return (*shape[:-1], _blocks(shape))
        case _:
            return tuple(shape)


def encoded_bytes(shape: Sequence[int], encoding: Encoding) -> int:
    """Bytes of the encoded tensor of a weight ``[..., out, in]``."""
    return prod(encoded_shape(shape, encoding)) * _ITEM_BYTES[encoding]


_ITEM_BYTES: dict[Encoding, int] = {
    FP32: 4,
    FP16: 2,
    BF16: 2,
    INT8: 1,
    INT8_SCALE: 4,
    INT8_ZERO: 1,
    INT4: 1,
    INT4_SCALE: 4,
}


def _blocks(shape: Sequence[int]) -> int:
    return -(-shape[-1] // INT4_BLOCK)
