"""Rows in batches that buckets take: the one way in which more rows than an engine takes at once are answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...bucket import Bucket
from ...errors import InputError
from ..inputs.arrays import Array


def batches(lengths: Array, buckets: Iterable[Bucket], truncate: bool, most: int | None = None) -> Iterator[Array]:
    """Row numbers, batch by batch, the longest rows first: rows go together by the least sequence that holds them, as
    many at a time as the largest bucket that takes it unpadded, and at most ``most``.

    Raises InputError, before the first batch, for a row that is longer than every bucket, unless ``truncate``.
    """
    buckets = list(buckets)
    sequences = np.array(sorted({bucket.sequence for bucket in buckets}))
    largest = {  # a range of longer sequences takes them as they are
        sequence: max(b.batch for b in buckets if b.smallest.sequence <= sequence <= b.sequence)
        for sequence in sequences.tolist()
    }
    longest = int(lengths.max())
    if longest > sequences[-1] and not truncate:
        raise InputError(
            f"row {int(lengths.argmax())}: {longest} steps, the largest bucket takes {sequences[-1]}; shorten it, "
            "truncate texts, or compile with a larger bucket"
        )
    order = np.argsort(-lengths, kind="stable")
    group = np.searchsorted(sequences, np.minimum(lengths[order], sequences[-1]))
    for number, sequence in reversed(list(enumerate(sequences.tolist()))):
        rows = order[group == number]
        size = min(largest[sequence], most or largest[sequence])
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


@dataclass(frozen=True)
class Split:
    """Rows in runs: ``parts`` are the numbers of the rows of each run and its shape, ``counts`` how many runs there are
    of each shape."""

    parts: Sequence[tuple[Array, Bucket]]
    counts: Mapping[Bucket, int]


def split(lengths: Array, buckets: Iterable[Bucket]) -> Split:
    """Rows of these ``lengths`` ``[N]`` in runs on engines of ``buckets``. Raises InputError as ``batches`` does."""
    parts = [(rows, Bucket(len(rows), max(1, int(lengths[rows].max())))) for rows in batches(lengths, buckets, False)]
    return Split(parts, Counter(shape for _, shape in parts))
