"""Who scores highest along the last dimension, and how much worse than that a choice is which something else made.

Equal scores rank by index, the lower first, in torch as in every engine (ONNX states this of TopK, torch does not).
Shapes: ``T`` tokens that are scored, ``C`` of them that are chosen, any dimensions before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScoreGap:
    """The worst choice of all routes: how much worse it is than the best, and which it is."""

    value: float
    where: str


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """``scores`` [..., T] to [..., count] int64: the places of the highest, by falling score."""
    order: torch.Tensor = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count]


def traced_highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """``highest`` as a graph has it: one TopK."""
    return scores.topk(count, dim=-1).indices


def taken(chosen: torch.Tensor, tokens: int) -> torch.Tensor:
    """``chosen`` [..., C] to [..., T]: whether a token is among them."""
    return torch.zeros(*chosen.shape[:-1], tokens, dtype=torch.bool).scatter(-1, chosen, True)


def ranking_gap(scores: torch.Tensor, chosen: torch.Tensor, named: Callable[[tuple[int, ...]], str]) -> ScoreGap:
    """By how much a token of ``scores`` [..., T] stands behind, or is left out for, one that scores less, in ``chosen``
    [..., C], which are by falling score.

    In units of the scores. ``named`` says what an index of the dimensions before is, such as ``row 3``.
    """
    left_out, best = scores.scatter(-1, chosen, -torch.inf).max(-1, keepdim=True)  # [..., 1]
    tokens, ranked = chosen, scores.gather(-1, chosen)  # [..., C]
    if chosen.shape[-1] < scores.shape[-1]:  # the best of those left out comes after all that were chosen
        tokens, ranked = torch.cat([chosen, best], -1), torch.cat([ranked, left_out], -1)  # [..., C + 1]
    least, at = ranked.cummin(-1)
    worse = ranked - least
    found = worst(worse)
    index, high = found[:-1], found[-1]
    low = int(at[found])
    verb = "took" if high == chosen.shape[-1] else "ranked"
    before, after = ((int(tokens[index][place]), shown(ranked[index][place])) for place in (low, high))
    return ScoreGap(
        float(worse[found]),
        f"{named(index)}: {verb} token {before[0]} ({before[1]}) before {after[0]} ({after[1]})",
    )


def indices_problem(given: torch.Tensor, shape: Sequence[int], least: int, most: int) -> str | None:
    """Why ``given`` cannot be indices ``least..most`` of this ``shape``, or None."""
    if list(given.shape) != list(shape) or given.dtype != torch.int64:
        return f"expected int64 {list(shape)}, got {str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
    for at in ((given < least) | (given > most)).nonzero().tolist():
        return f"expected {least}..{most}, got {int(given[tuple(at)])} at {at}"
    return None


def repeated_token(chosen: torch.Tensor, named: Callable[[tuple[int, ...]], str]) -> str | None:
    """Which token stands twice among those of ``chosen`` [..., C], or None; ``named`` as in ``ranking_gap``."""
    rising = chosen.sort(-1).values
    for found in (rising[..., 1:] == rising[..., :-1]).nonzero().tolist():
        return f"{named(tuple(found[:-1]))}: took token {int(rising[tuple(found)])} twice"
    return None


def worst(worse: torch.Tensor) -> tuple[int, ...]:
    """Where the largest number stands; one that is no number counts as the largest."""
    at = int(torch.nan_to_num(worse, nan=torch.inf, posinf=torch.inf).argmax())
    return tuple(int(index) for index in torch.unravel_index(torch.tensor(at), worse.shape))


def shown(score: torch.Tensor) -> str:
    """A score in a message."""
    return f"{float(score):.4g}"
