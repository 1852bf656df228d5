"""What rounding makes of weights."""

from __future__ import annotations

import numpy as np
from nestforge.compiler.graph.encodings import decoded, encode, split_encoding
from nestforge.profiles.precision import SCALES


def rounded(array: np.ndarray, name: str) -> np.ndarray:
    """The numbers that the encoded tensor ``name`` of the float32 ``array`` stands for."""
    plain, encoding = split_encoding(name)
    scales = [encode(array, plain + one) for one in SCALES.get(encoding, ())]
    return decoded(encode(array, name), name, *scales)[..., : array.shape[-1]]
