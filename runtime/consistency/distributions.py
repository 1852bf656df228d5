"""What two models say of the same position, compared: logits in, figures out, by hand-checkable formulas.

Logits are ``[..., V]``; every function reduces the last dimension.
"""

from __future__ import annotations

import numpy as np

from ..inputs.arrays import Array


def log_softmax(logits: Array) -> Array:
    """Log-probabilities ``[..., V]`` in nats, float64; logits of any finite size neither overflow nor vanish."""
    shifted: Array = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def kl_divergence(p: Array, q: Array) -> Array:
    """``KL(P || Q)`` ``[...]`` in nats, of log-probabilities ``[..., V]``; exactly 0 where both are the same."""
    divergence: Array = np.sum(np.exp(p) * (p - q), axis=-1)
    return np.maximum(divergence, 0.0)  # below 0 is rounding


def same_choice(reference: Array, found: Array) -> Array:
    """Whether both logits are largest at the same place ``[...]``; among equal ones the first counts."""
    same: Array = reference.argmax(axis=-1) == found.argmax(axis=-1)
    return same


def negative_log_likelihood(p: Array, truth: Array) -> Array:
    """``-log P(truth)`` ``[...]`` in nats, of log-probabilities ``[..., V]`` and whole numbers ``[...]``."""
    taken: Array = np.take_along_axis(p, truth[..., None], axis=-1)
    return -taken[..., 0]


def prefix_length(same: Array) -> int:
    """How many of the booleans ``[n]`` are true before the first that is not."""
    differing = np.flatnonzero(~same)
    return int(differing[0]) if len(differing) else len(same)
