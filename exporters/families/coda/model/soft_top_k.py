"""The soft top-k of conditional adapters: ``argmax sum(s * g) + epsilon * H(g)`` over gates of sum k, in T rounds.

The rounds are part of the model, not a solver: how far they come is what was trained. In place of the paper's two
vectors a and b the state is one number for each row, ``c = -a`` (b follows from it): an equivalent form whose exponents
are at most 0, so that nothing overflows.

    u = s, or 0 where b starts at minus the scores
    T times, at temperature e:   c = M + e (ln sum exp((u - M) / e) - ln k),   u = min(s, c)         with M = max(u)
    gates = exp(min(s - c, 0) / epsilon)
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
    # One by one, which the compiler folds where they are constants; not so a split.
    *rounds, last = (given[t : t + 1] for t in range(len(given)))
    # A traced row of any length has a count that the graph computes.
    share = torch.full((), count, dtype=scores.dtype).log() if isinstance(count, torch.SymInt) else math.log(count)
    top = scores.amax(-1, keepdim=True)
    u, peak = (scores, top) if schedule.initial == "zero" else (torch.zeros_like(scores), torch.zeros_like(top))
    level = peak
    for epsilon in rounds:
        total = ((u - peak) / epsilon).exp().sum(-1, keepdim=True)
        level = peak + epsilon * (total.log() - share)  # [..., 1]
        u, peak = torch.minimum(scores, level), torch.minimum(top, level)
    return ((scores - level).clamp(max=0) / last).exp()
