"""Vectors in fewer bits, as ``encode`` of sentence-transformers returns them for a ``precision``."""

from __future__ import annotations

import logging
from typing import Literal, get_args

import numpy as np

from ..errors import InputError
from ..runtime.inputs.arrays import Array

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Vectors below which the library warns that ranges taken from them are unsteady.
_FEW = 100
_STEPS = 255
_LOGGER = logging.getLogger("nestforge")


def quantised(vectors: Array, precision: Precision | None) -> Array:
    """``vectors`` ``[N, D]`` float32 in ``precision``, unchanged for float32 and None.

    In int8 and uint8, ``[N, D]``, each dimension is cut into 255 steps between the least and the largest number that it
    has in ``vectors``, which one line of the logger ``nestforge`` says of few. In binary (int8) and ubinary (uint8),
    ``[N, ceil(D / 8)]``, a bit says whether a number is above 0. Raises InputError for the range of a single vector.
    """
    if precision is None or precision == "float32":
        return vectors
    if precision in ("binary", "ubinary"):
        bits: Array = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits - np.uint8(128)).view(np.int8)
    if len(vectors) == 1:
        raise InputError(
            f"precision {precision!r}: a single vector has no ranges; encode several at once, or give ranges of your "
            "own to sentence_transformers.util.quantize_embeddings"
        )
    if not len(vectors):
        return vectors.astype(precision)
    if len(vectors) < _FEW:
        _LOGGER.warning("precision %s: the ranges are those of %d vectors alone", precision, len(vectors))
    least = vectors.min(axis=0)
    step = (vectors.max(axis=0) - least) / _STEPS
    steps: Array = np.clip(np.floor((vectors - least) / np.where(step == 0, np.float32(1), step)), 0, _STEPS)
    return steps.astype(np.uint8) if precision == "uint8" else (steps - 128).astype(np.int8)
