"""How a tensor of the weight store is called and encoded: its name says how its bytes follow from float32 parameters.

``W.T`` is transposed, ``W[3]`` row 3 of a stack, and ``a+b`` the rows of ``a`` and then those of ``b``; the encoding of
any of them is a suffix behind it.

A submodel stays a prefix in every encoding. ``W [out, in]`` has a scale for each output, so that its first rows go with
the first scales; ``W.T [in, out]``, whose inputs shrink, has one for each output too, and keeps them all. A stack of
matrices ``[E, ...]`` has scales for each of them. In 4 bits an output has a scale for every 32 or 128 inputs; a
transposed matrix has no such encoding, since a prefix of its inputs may end inside a block.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ...profiles.precision import (
    BF16,
    BLOCK_INPUTS,
    ENCODINGS,
    FOUR_BITS,
    FP16,
    FP32,
    INT4,
    INT4_G128,
    INT4_G128_SCALE,
    INT4_SCALE,
    INT8,
    INT8_SCALE,
    INT8_ZERO,
    Encoding,
)
from .passes.contract import TABLE_PREFIX, TRANSPOSED, joined_parts, stack_of

DTYPES: Mapping[Encoding, np.dtype[Any]] = {
    FP32: np.dtype(np.float32),
    FP16: np.dtype(np.float16),
    BF16: np.dtype(ml_dtypes.bfloat16),
    INT8: np.dtype(np.int8),
    INT8_SCALE: np.dtype(np.float32),
    INT8_ZERO: np.dtype(np.int8),
    INT4: np.dtype(np.uint8),
    INT4_SCALE: np.dtype(np.float32),
    INT4_G128: np.dtype(np.uint8),
    INT4_G128_SCALE: np.dtype(np.float32),
}
PER_OUTPUT = (INT8_SCALE, INT8_ZERO)  # one number for each output, in a transposed weight too
# Seven bits: x86 processors without VNNI add the products of two pairs of numbers in 16 bits and clip what is larger.
# 2 * 255 * 63 is not, so that an engine gives the same integers on every processor. The eighth bit would be worth
# little (all-MiniLM-L6-v2: a mean cosine to float32 of 0.994 in place of 0.993), since activations lose more.
_LARGEST_INT8 = 63
# Values of the largest weight of a block in 4 bits, beside -8: a little more is clipped, less is spread wider.
_INT4_STEPS = (7.0, 7.5, 8.5, 9.0, 9.5)
# Integers of the largest weight of a row or a block where none is clipped, and how many times the squares of half a
# step rounding may leave in an output, and in a block: float32 adds a little. With 4 bits plain rounding leaves 0.35
# and 0.7 times as much, and what examples chose mostly less than once; zeros, or twice the numbers, in the place of a
# block leave 14^2 / 32 = 6.1 times as much or more, and of 128 inputs 1.5 times.
_STEPS: Mapping[Encoding, tuple[int, float, float]] = {
    INT8: (_LARGEST_INT8, 1.001, 1.001),
    INT4: (7, 2.0, 6.0),
    INT4_G128: (7, 1.5, 1.5),
}


def split_encoding(name: str) -> tuple[str, Encoding]:
    """The float32 tensor that an encoded one was made from, and its encoding; an empty one for float32 itself.

    A row of stacked weights, ``W[3].int8``, is a row of the encoded stack ``W.int8``.
    """
    encoding = next((suffix for suffix in ENCODINGS if name.endswith(suffix)), FP32)
    return name.removesuffix(encoding), encoding


def stored_stack(name: str) -> tuple[str, int | None]:
    """The tensor of the store that ``name`` is, or that it is a row of: ``W[3].int8`` is row 3 of ``W.int8``."""
    plain, encoding = split_encoding(name)
    stack, row = stack_of(plain)
    return stack + encoding, row


def parts_of(name: str) -> tuple[str, ...]:
    """The tensors whose rows lie one behind the other in the joined tensor ``name``, in its encoding: ``a+b.int8`` is
    ``a.int8`` and then ``b.int8``; of any other itself alone. An encoding of rows is the rows' encoding, so these are
    their bytes."""
    plain, encoding = split_encoding(name)
    return tuple(part + encoding for part in joined_parts(plain))


def encode(array: np.ndarray, name: str, scale: np.ndarray | None = None) -> np.ndarray:
    """The bytes of the encoded tensor ``name``, made from the float32 ``array`` as the store lays it out; in 4 bits by
    ``scale``, where that is known, since it is searched for."""
    plain, encoding = split_encoding(name)
    match encoding:
        case ".fp16":
            return array.astype(np.float16)
        case ".bf16":
            return array.astype(ml_dtypes.bfloat16)
        case ".int8" | ".int8-scale" | ".int8-zero":
            transposed = plain.endswith(TRANSPOSED)
            scale = _scale(array, transposed)
            if encoding == INT8_SCALE:
                return scale
            if encoding == INT8_ZERO:
                return np.zeros(scale.shape, np.int8)
            spread = np.expand_dims(scale, -2 if transposed else -1)
            return np.clip(np.rint(array / spread), -_LARGEST_INT8, _LARGEST_INT8).astype(np.int8)
        case ".int4" | ".int4-scale" | ".int4-g128" | ".int4-g128-scale":
            assert not plain.endswith(TRANSPOSED), name
            blocks = in_blocks(array, BLOCK_INPUTS[encoding])
            scale = int4_scale(blocks) if scale is None else scale
            return packed(_int4(blocks, scale)) if encoding in FOUR_BITS else scale
        case _:
            return array


def decoded(tensor: np.ndarray, name: str, scale: np.ndarray | None = None) -> np.ndarray:
    """The float32 numbers that the encoded ``tensor`` called ``name`` stands for: integers by their ``scale``, those of
    4 bits in whole blocks."""
    plain, encoding = split_encoding(name)
    if scale is None:
        return np.asarray(tensor, np.float32)
    if encoding in FOUR_BITS:
        return unpacked(tensor, scale)
    return tensor * np.expand_dims(scale, -2 if plain.endswith(TRANSPOSED) else -1)


def beyond_rounding(numbers: np.ndarray, array: np.ndarray, name: str) -> np.ndarray:
    """The blocks (bool ``[..., out, blocks]``; of 8 bits one of each output) of the float32 ``array`` of which
    ``numbers`` cannot be what the encoding of ``name`` makes: all of an output, or single ones.

    Those are off by more, in the sum of squares, than steps that clip no weight can make them: another output's
    numbers, a sign and half or twice a scale are off by several times as much. None in an encoding of no integers.
    """
    plain, encoding = split_encoding(name)
    if encoding not in _STEPS:
        return np.zeros((*array.shape[:-1], 1), bool)
    steps, of_output, of_block = _STEPS[encoding]
    turned = [part.swapaxes(-1, -2) if plain.endswith(TRANSPOSED) else part for part in (numbers, array)]
    rounded, exact = (in_blocks(part, BLOCK_INPUTS.get(encoding, part.shape[-1])) for part in turned)
    half = np.square(np.abs(exact).max(axis=-1) / (2 * steps)) * exact.shape[-1] + np.finfo(np.float32).tiny
    off = np.square(rounded - exact).sum(axis=-1)
    is_within = off.sum(axis=-1, keepdims=True) <= of_output * half.sum(axis=-1, keepdims=True)
    return np.asarray(~(is_within & (off <= of_block * half)))


def unpacked(integers: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The numbers ``[..., in]`` that integers of 4 bits and their scales stand for; ``in`` are whole blocks."""
    halves = np.stack([integers & 15, integers >> 4], axis=-1).reshape(*scale.shape, -1)
    return _spread(halves.astype(np.int8) - 8, scale)


def table_name(array: np.ndarray) -> str:
    """The name of a table of the store, which follows from its content: what is equal is one table."""
    content = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode() + array.tobytes()).hexdigest()
    return TABLE_PREFIX + content[:16]


def _scale(array: np.ndarray, transposed: bool) -> np.ndarray:
    """One scale for each output: ``[out]`` of a matrix, ``[E, out]`` of a stack; 1 where all weights are 0."""
    largest = np.abs(array).max(axis=-2 if transposed else -1)
    return np.where(largest > 0, largest / _LARGEST_INT8, 1).astype(np.float32)


def in_blocks(array: np.ndarray, size: int) -> np.ndarray:
    """``[..., out, in]`` as ``[..., out, blocks, size]``; the last block is filled with zeros."""
    whole = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % size)])
    return whole.reshape(*array.shape[:-1], -1, size)


def int4_scale(blocks: np.ndarray) -> np.ndarray:
    """One scale for each block, the one of a few that leaves the least squared error; 1 where all weights are 0.

    The weight of the largest magnitude becomes -8, the only value of that magnitude, or is clipped a little.
    """
    place = np.expand_dims(np.abs(blocks).argmax(axis=-1), -1)
    largest = np.take_along_axis(blocks, place, axis=-1)[..., 0]
    best = np.where(largest == 0, 1, largest / -8).astype(np.float32)
    error = _squared_error(blocks, best)
    for steps in _INT4_STEPS:
        scale = np.where(largest == 0, 1, largest / -steps).astype(np.float32)
        found = _squared_error(blocks, scale)
        best, error = np.where(found < error, scale, best), np.minimum(found, error)
    return best


def _squared_error(blocks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    spread = np.expand_dims(scale, -1)
    return np.square(_int4(blocks, scale) * spread - blocks).sum(axis=-1)


def _spread(integers: np.ndarray, scale: np.ndarray) -> np.ndarray:
    whole: np.ndarray = integers.astype(np.float32) * np.expand_dims(scale, -1)
    return whole.reshape(*scale.shape[:-1], -1)


def _int4(blocks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(blocks / np.expand_dims(scale, -1)), -8, 7).astype(np.int8)


def packed(values: np.ndarray) -> np.ndarray:
    """Integers ``[..., blocks, inputs]`` from -8 to 7, two in a byte, the even ones in the low halves."""
    halves = (values + 8).astype(np.uint8)
    return halves[..., 0::2] | (halves[..., 1::2] << 4)
