"""By how much routes are worse than the ones that the scores call for: 0 for the router's own, little for a near tie.

Gaps are in units of the scores, which are probabilities over experts. Shapes as in router.py; routes are possible
ones: no token twice in an expert, no expert beyond its slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .router import DROPPED


@dataclass(frozen=True)
class ScoreGap:
    """The worst choice of all routes: how much worse it is than the best, and which it is."""

    value: float
    where: str


def experts_gap(scores: torch.Tensor, chosen: torch.Tensor) -> ScoreGap:
    """Of ``chosen`` [G, K, C], the tokens of each expert by falling score, under ``scores`` [G, T, E].

    By how much a token stands behind, or is left out for, one that scores less.
    """
    by_expert = scores[..., : chosen.shape[1]].transpose(1, 2)  # [G, K, T]
    left_out, best = by_expert.scatter(-1, chosen, -torch.inf).max(-1, keepdim=True)  # [G, K, 1]
    tokens, ranked = chosen, by_expert.gather(-1, chosen)  # [G, K, C]
    if chosen.shape[2] < by_expert.shape[2]:  # the best of those left out comes after all slots
        tokens, ranked = torch.cat([chosen, best], -1), torch.cat([ranked, left_out], -1)  # [G, K, C + 1]
    least, at = ranked.cummin(-1)
    worse = ranked - least
    group, expert, place = _worst(worse)
    low, high = int(at[group, expert, place]), place
    verb = "took" if high == chosen.shape[2] else "ranked"
    return ScoreGap(
        float(worse[group, expert, place]),
        f"group {group}, expert {expert}: {verb} token {int(tokens[group, expert, low])} "
        f"({_shown(ranked[group, expert, low])}) before {int(tokens[group, expert, high])} "
        f"({_shown(ranked[group, expert, high])})",
    )


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
    group, token = _worst(worse)
    own, taken = int(first[group, token]), int(chosen[group, token])
    wanted = f"expert {own} ({_shown(best[group, token])})"
    if taken == DROPPED:
        done = f"was dropped, its best is {wanted}"
    else:
        done = f"went to expert {taken} ({_shown(scores[group, token, taken])}), its best is {wanted}"
    return ScoreGap(float(worse[group, token]), f"group {group}, token {token} {done}")


def holds(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """``chosen`` [G, T] to [G, T, E]: whether an expert computes a token."""
    return chosen[..., None] == torch.arange(experts)


def _worst(worse: torch.Tensor) -> tuple[int, ...]:
    """Where the largest number stands; one that is no number counts as the largest."""
    at = int(torch.nan_to_num(worse, nan=torch.inf, posinf=torch.inf).argmax())
    return tuple(int(index) for index in torch.unravel_index(torch.tensor(at), worse.shape))


def _shown(score: torch.Tensor) -> str:
    return f"{float(score):.4g}"
