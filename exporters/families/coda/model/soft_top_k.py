"""The soft top-k of conditional adapters: ``argmax sum(s * g) + epsilon * H(g)`` over gates of sum k, in T rounds.

The rounds are part of the model, not a solver: how far they come is what was trained. In place of the paper's two
vectors a and b the state is one number for each row, ``c = -a`` (b follows from it): an equivalent form whose exponents
are at most 0, so that nothing overflows. With u = s, or 0 where b starts at minus the scores:

    T times, at temperature e:   c = e (ln sum exp(u / e) - ln k),   u = min(s, c)
    gates = exp(min(s - c, 0) / epsilon)

In a graph a round costs by its operations, not by its numbers. So c is kept in units of the temperature to come, where
``x = min(s, c) / e`` is compared and summed without a product, and ``- ln k`` is not subtracted from round to round but
put into the scores of every round beforehand: they are shifted by ``o_t = -ln k (e_t + ... + e_(T-1)) / e_t``, so that
what is left of all shifts at the end is 0. The sum is read off a log-softmax, ``x - log_softmax(x)``, which keeps its
exponents at most 0 in every engine.
"""

from __future__ import annotations

import math

import torch

from ..architecture.config import SoftTopK


def soft_top_k(
    scores: torch.Tensor, count: int, schedule: SoftTopK, temperatures: torch.Tensor | None = None
) -> torch.Tensor:
    """``scores`` [..., n] (float32 or wider) to gates [..., n] between 0 and 1 whose sum comes close to ``count``.

    ``temperatures`` [T + 1] are those of the rounds and of the gates, in place of the ``schedule``'s.
    """
    if temperatures is None:
        temperatures = torch.tensor(schedule.all_temperatures, dtype=scores.dtype)
    given = temperatures.to(scores.dtype)
    rounds = given[:-1]
    # A traced row of any length has a count that the graph computes.
    share = torch.full((), count, dtype=scores.dtype).log() if isinstance(count, torch.SymInt) else math.log(count)
    shifts = torch.cat([rounds.flip(0).cumsum(0).flip(0) / rounds * -share, torch.zeros_like(given[-1:])])
    ratios = rounds / given[1:]  # of each temperature to the next
    each = (-1, *(1 for _ in scores.shape))
    first, *others = torch.split(scores / given.view(each) + shifts.view(each), 1)  # T + 1 of [1, ..., n]
    x = first if schedule.initial == "zero" else torch.zeros_like(first) + shifts[:1]
    level = x
    for number, shifted in enumerate(others):
        # One by one, which the compiler folds where they are constants; not so a split.
        level = (x - x.log_softmax(-1)) * ratios[number : number + 1]
        x = torch.minimum(shifted, level)
    return (x - level).exp()[0]
