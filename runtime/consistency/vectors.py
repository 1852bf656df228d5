"""How two models place the same inputs in space: rows ``[n, H]`` of each, compared."""

from __future__ import annotations

import numpy as np

from ..inputs.arrays import Array

# Scores of this many rows against all others are held at once.
_ROWS_SCORED_AT_ONCE = 256


def cosines(reference: Array, found: Array) -> Array:
    """Cosine similarity of rows ``[n, H]``, float64 ``[n]``; of a row of zeros it is 0."""
    similar: Array = np.sum(unit(reference) * unit(found), axis=1)
    return similar


def recalls_at(reference: Array, found: Array, k: int) -> Array:
    """Share of each row's ``k`` nearest others by ``reference`` that are among its ``k`` by ``found``, float64 ``[n]``.

    Nearness is cosine similarity, of equal ones the earlier row is nearer; ``k`` is at most ``n - 1``.
    """
    k = min(k, len(reference) - 1)
    near = [_nearest(rows, k) for rows in (reference, found)]
    return np.array([len(set(a) & set(b)) / k for a, b in zip(*near, strict=True)])


def unit(rows: Array) -> Array:
    """Rows ``[n, H]`` of length 1, float64."""
    wide = rows.astype(np.float64)
    scaled: Array = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)
    return scaled


def _nearest(rows: Array, k: int) -> list[list[int]]:
    directions = unit(rows)
    nearest: list[list[int]] = []
    for start in range(0, len(rows), _ROWS_SCORED_AT_ONCE):
        scores = directions[start : start + _ROWS_SCORED_AT_ONCE] @ directions.T  # [rows, n]
        own = np.arange(len(scores))
        scores[own, start + own] = -np.inf
        nearest += np.argsort(-scores, axis=1, kind="stable")[:, :k].tolist()
    return nearest
