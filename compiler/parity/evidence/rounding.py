"""What PyTorch's own float32 is off by, place by place, and what that adds to a limit.

A place is a position of a row ``[B, S, ...]``, or a row of what has no positions ``[B, ...]``: one ill-conditioned row
or position widens no limit but its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# Two float32 computations of one value are off by as much in the mean, but either may be lucky.
ROUNDING_FACTOR = 4.0


@dataclass(frozen=True)
class Rounding:
    """What PyTorch's own float32 differs by from the reference, on one output of one case: at most, and rms.

    Float64 ``[B, S]`` or ``[B]``, a figure per place; a single one stands for every place.
    """

    max_abs: np.ndarray | float = 0.0
    rms: np.ndarray | float = 0.0

    def worst(self, other: Rounding) -> Rounding:
        return Rounding(np.maximum(self.max_abs, other.max_abs), np.maximum(self.rms, other.rms))

    @property
    def largest(self) -> float:
        return float(np.max(self.max_abs))

    @property
    def rms_of_all(self) -> float:
        return float(np.sqrt(np.mean(np.square(self.rms))))

    @property
    def of_all(self) -> Rounding:
        """The same figure for every place."""
        return Rounding(self.largest, self.rms_of_all)


Roundings = Mapping[str, Rounding]


def rounding(reference: np.ndarray, float32: np.ndarray) -> Rounding:
    """Of one output; infinite in places where ``float32`` is not finite."""
    finite = np.isfinite(float32)
    difference = np.where(finite, float32, np.inf).astype(np.float64) - np.where(finite, reference, 0.0)
    within_place = tuple(range(places(reference), reference.ndim))
    return Rounding(
        np.abs(difference).max(axis=within_place, initial=0.0),
        np.sqrt(np.mean(np.square(difference), axis=within_place)),
    )


def places(array: np.ndarray) -> int:
    """How many leading dimensions of an output number its places."""
    return min(2, max(1, array.ndim - 1), array.ndim)


def with_rounding(limit: np.ndarray | float, own: np.ndarray | float) -> np.ndarray:
    """``limit`` where PyTorch's ``own`` error takes up at most half of it; more of it where that takes up more."""
    return limit + ROUNDING_FACTOR * np.maximum(0.0, own - limit / 2)
