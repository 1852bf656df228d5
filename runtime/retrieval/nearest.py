"""The nearest rows of a corpus by cosine, exactly: what a search in float64 over every row would find."""

from __future__ import annotations

import numpy as np

from ...errors import InputError
from ..inputs.arrays import Array

# Scores held at a time (float32) and values of a block that is scored again in float64: 64 MB each.
_SCORES_AT_ONCE = 2**24
_VALUES_AT_ONCE = 2**23


def nearest(corpus: Array, queries: Array, k: int) -> tuple[Array, Array]:
    """Row numbers ``[Q, k]`` int64 and scores ``[Q, k]`` float32, the best first; of equal ones the lowest row first.

    ``corpus`` ``[N, H]`` and ``queries`` ``[Q, H]`` are float32 rows of length 1. With fewer than ``k`` rows all of
    them are returned. Matrix products round differently by where in a block a row lies, so they only narrow the rows
    down; rows that may be among the best are scored again, each by the same sum in float64.
    """
    k = min(k, len(corpus))
    ids = np.empty((len(queries), k), np.int64)
    scores = np.empty((len(queries), k), np.float32)
    step = max(1, _SCORES_AT_ONCE // len(corpus))
    # Each score is off by at most width * 2^-24: so may be the k-th best, and a row that belongs before it.
    margin = 2.5 * corpus.shape[1] * 2.0**-24
    for start in range(0, len(queries), step):
        part = queries[start : start + step]
        rough = part @ corpus.T
        worst = np.partition(rough, len(corpus) - k, axis=1)[:, len(corpus) - k]
        for number, query in enumerate(part):
            rows = np.flatnonzero(rough[number] >= worst[number] - margin)
            exact = _exact(corpus, rows, query)
            best = np.lexsort((rows, -exact))[:k]
            ids[start + number], scores[start + number] = rows[best], exact[best]
    return ids, scores


def check_k(k: int) -> None:
    """Raises InputError unless ``k`` is a whole number of at least 1."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise InputError(f"k: expected a whole number of at least 1, got {k!r:.80}")


def unit(rows: Array) -> Array:
    """``rows`` ``[N, H]`` divided by their Euclidean length, float32; NaN where that is 0 or not finite."""
    wide = rows.astype(np.float64)
    length = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
    length[(length == 0) | ~np.isfinite(length)] = np.nan
    result: Array = (wide / length).astype(np.float32)
    return result


def _exact(corpus: Array, rows: Array, query: Array) -> Array:
    """Inner products of ``corpus[rows]`` with ``query`` in float64, equal for equal rows."""
    wide = query.astype(np.float64)
    step = max(1, _VALUES_AT_ONCE // len(query))
    parts = [(corpus[rows[start : start + step]] * wide).sum(axis=1) for start in range(0, len(rows), step)]
    return np.concatenate(parts)
