"""Inputs as an engine takes them: random ones, for timing and for checking one form of an engine against another, and
at which of its shapes given ones are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import RowNeed, TensorSpec
from .arrays import Array


def random_feeds(inputs: Iterable[TensorSpec], bucket: Bucket, seed: int = 0) -> dict[str, Array]:
    """One value per input at ``bucket``'s shape, the same for the same seed.

    Whole numbers lie in ``[0, high)``, or are 0 where the manifest states no ``high``; floats are standard normal. Of a
    mask every row has what it needs, and hides a position where it has several.
    """
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for spec in inputs:
        shape, dtype = spec.shape(bucket), np.dtype(spec.dtype)
        if dtype.kind == "f":
            feeds[spec.name] = rng.standard_normal(shape).astype(dtype)
        elif dtype.kind == "b":
            feeds[spec.name] = rng.integers(0, 2, shape).astype(dtype)
        else:
            feeds[spec.name] = rng.integers(0, spec.high or 1, shape).astype(dtype)
        if spec.row_needs is not None:
            _mend(feeds[spec.name], spec.row_needs, rng)
    return feeds


class HasShape(Protocol):
    """An array, wherever it lies."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def nearest_shape(inputs: Iterable[TensorSpec], feeds: Mapping[str, HasShape], bucket: Bucket) -> Bucket:
    """The shape of an engine at ``bucket`` that ``feeds`` have, or come nearest to where they do not fit it."""
    if bucket.is_static:
        return bucket
    sizes = named_sizes(inputs, feeds)
    return bucket.nearest(Bucket(sizes.get("batch", bucket.batch), sizes.get("sequence", bucket.sequence)))


def named_sizes(inputs: Iterable[TensorSpec], feeds: Mapping[str, HasShape]) -> dict[str, int]:
    """The size that each named dimension has in the first of ``feeds`` with one of that name."""
    sizes: dict[str, int] = {}
    for spec in inputs:
        if spec.name in feeds:
            for dim, size in zip(spec.dims, feeds[spec.name].shape, strict=False):
                if isinstance(dim, str):
                    sizes.setdefault(dim, size)
    return sizes


def _mend(mask: Array, need: RowNeed, rng: np.random.Generator) -> None:
    """Sets positions of a random ``mask`` ``[B, S]`` so that no row is without a token, nor without a hidden one."""
    rows, length = mask.shape
    for row in range(rows):
        token = 0 if need == "first_token" else int(rng.integers(length))
        if need == "first_token" or not mask[row].any():
            mask[row, token] = 1
        if mask[row].all() and length > 1:
            mask[row, (token + 1) % length] = 0
