"""Which expert computes which token: Experts Choose, and Tokens Choose top-1 with Batch Prioritized Routing.

Shapes: ``G`` groups, ``T`` tokens of a group, ``E`` experts that are scored, ``K`` that are kept, ``C`` slots of an
expert. Equal scores fall to the lower index, of tokens as of experts, in torch as in every engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from ....modules.top_tokens import highest
from ..architecture.config import Router as Policy

DROPPED = -1


@dataclass(frozen=True)
class Routes:
    """The routing of one layer in one pass.

    ``logits`` and ``scores`` (their softmax) are [G, T, E]. ``own`` is what the router decides (``experts_choose``,
    ``tokens_choose``), ``chosen`` what was computed: the same unless routes were given. ``gates`` has its shape: the
    score of each choice, 0 for a dropped token.
    """

    logits: torch.Tensor
    scores: torch.Tensor
    own: torch.Tensor
    chosen: torch.Tensor
    gates: torch.Tensor


class Router(torch.nn.Linear):
    """Scores every token for every expert, in float32 or better whatever the rest computes in: rounding makes ties."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` [G, T, d] to logits [G, T, E]."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        return functional.linear(tokens.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


def experts_choose(scores: torch.Tensor, capacity: int, kept: int) -> torch.Tensor:
    """``scores`` [G, T, E] to [G, K, C]: the tokens of each of the first ``kept`` experts, by falling score."""
    return highest(scores[..., :kept].transpose(1, 2), capacity)


def tokens_choose(scores: torch.Tensor, capacity: int, prioritized: bool) -> torch.Tensor:
    """``scores`` [G, T, E] to [G, T]: the expert of each token, DROPPED where that expert has no slot left.

    Tokens are served by falling score where ``prioritized``, else as they come.
    """
    first = first_choice(scores)  # [G, T]
    best = scores.gather(-1, first[..., None])[..., 0]
    served = functional.one_hot(first, scores.shape[-1])  # [G, T, E]
    if prioritized:
        order = highest(best, best.shape[-1])  # [G, T]
        served = served.gather(1, order[..., None].expand_as(served))
    slot = (served.cumsum(1) * served).sum(-1) - 1  # [G, T], in the order of service
    if prioritized:
        slot = torch.empty_like(slot).scatter_(1, order, slot)
    return torch.where(slot < capacity, first, DROPPED)


def first_choice(scores: torch.Tensor) -> torch.Tensor:
    """``scores`` [G, T, E] to [G, T]: the expert that each token scores highest."""
    return highest(scores, 1)[..., 0]


def gates_of(scores: torch.Tensor, chosen: torch.Tensor, policy: Policy) -> torch.Tensor:
    """The scores of the choices ``chosen``, in their shape; 0 for a dropped token."""
    if policy == "experts_choose":
        by_expert = scores[..., : chosen.shape[1]].transpose(1, 2)  # [G, K, T]
        return by_expert.gather(-1, chosen)
    taken = scores.gather(-1, chosen.clamp(min=0)[..., None])[..., 0]
    return taken.masked_fill(chosen == DROPPED, 0.0)
