"""Drafted tokens, kept or replaced so that a text has the distribution of the submodel that checks it.

A token drawn from a draft's distribution ``q`` is kept with probability ``min(1, p/q)``, where ``p`` is the checking
submodel's; one that is not is replaced by a draw from ``max(0, p - q)``. What comes out is distributed as ``p``
(Leviathan et al. 2023, theorem 3.5; Chen et al. 2023). Both distributions are those after penalty, temperature and
filters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .sampling import Ids, Logits, Probabilities, Sampler


class Drafted(NamedTuple):
    """A proposed token, with the distribution ``[V]`` that it was drawn from; None where chance had no part in it."""

    token: int
    probabilities: Probabilities | None = None


def draw_draft(sampler: Sampler, logits: Logits, history: Ids) -> Drafted:
    """The draft's next token by its ``logits`` ``[V]`` behind ``history``, the tokens drafted before included."""
    if sampler.sampling.greedy:
        return Drafted(sampler.pick(logits, history))
    probabilities = sampler.probabilities(logits, history)
    return Drafted(sampler.draw(probabilities), probabilities)


def pick_checked(sampler: Sampler, logits: Logits, history: Ids, drafted: Drafted) -> int:
    """The next token by the checking submodel's ``logits`` ``[V]``: the drafted one where it is kept, never that one
    where it is not."""
    if sampler.sampling.greedy:
        return sampler.pick(logits, history)
    own = sampler.probabilities(logits, history)
    token, draft = drafted
    if draft is None:
        draft = np.zeros_like(own)
        draft[token] = 1
    rest = np.maximum(own - draft, 0)
    # The sum is 0 where both are the same but for rounding.
    if sampler.uniform() * draft[token] < own[token] or not rest.any():
        return token
    return sampler.draw(rest)
