"""By how much routes are worse than the ones that the scores call for: 0 for the router's own, little for a near tie.

Gaps are in units of the scores, which are probabilities over experts. Shapes as in router.py; routes are possible
ones: no token twice in an expert, no expert beyond its slots.
"""

from __future__ import annotations

import torch

from ....modules.top_tokens import ScoreGap, ranking_gap, shown, worst
from .router import DROPPED


def experts_gap(scores: torch.Tensor, chosen: torch.Tensor) -> ScoreGap:
    """Of ``chosen`` [G, K, C], the tokens of each expert by falling score, under ``scores`` [G, T, E].

    By how much a token stands behind, or is left out for, one that scores less.
    """
    by_expert = scores[..., : chosen.shape[1]].transpose(1, 2)  # [G, K, T]
    return ranking_gap(by_expert, chosen, group_and_expert)


def group_and_expert(index: tuple[int, ...]) -> str:
    """What the first two dimensions of the routes of Experts Choose count."""
    group, expert = index
    return f"group {group}, expert {expert}"


def tokens_gap(scores: torch.Tensor, chosen: torch.Tensor, capacity: int, prioritized: bool) -> ScoreGap:
    """Of ``chosen`` [G, T], the expert of each token or DROPPED, under ``scores`` [G, T, E].

    A token that an expert computes: by how much another expert scores higher. A dropped one: the least by which an
    expert without a free slot may lie below its best, or, where tokens are ``prioritized``, above one that has a slot
    there; infinite where no expert is full (without priorities: of tokens before it).
    """
    best, first = scores.max(-1)  # [G, T]
    missed = best[..., None] - scores  # [G, T, E]
    kept = holds(chosen, scores.shape[-1])  # [G, T, E]
    full = kept.sum(1, keepdim=True) == capacity  # [G, 1, E]
    if prioritized:
        lowest = scores.masked_fill(~kept, torch.inf).amin(1, keepdim=True)  # [G, 1, E]
        refusal = torch.maximum(missed, scores - lowest)
    else:
        before = kept.cumsum(1) - kept.long()
        refusal = missed.masked_fill(before < capacity, torch.inf)
    refusal = refusal.masked_fill(~full, torch.inf).amin(-1)  # [G, T]
    expert = chosen.clamp(min=0)
    worse = torch.where(chosen == DROPPED, refusal, missed.gather(-1, expert[..., None])[..., 0])
    group, token = worst(worse)
    own, taken = int(first[group, token]), int(chosen[group, token])
    wanted = f"expert {own} ({shown(best[group, token])})"
    if taken == DROPPED:
        done = f"was dropped, its best is {wanted}"
    else:
        done = f"went to expert {taken} ({shown(scores[group, token, taken])}), its best is {wanted}"
    return ScoreGap(float(worse[group, token]), f"group {group}, token {token} {done}")


def holds(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """``chosen`` [G, T] to [G, T, E]: whether an expert computes a token."""
    return chosen[..., None] == torch.arange(experts)
