"""What training adds to the loss of a model with experts; no engine has any of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..architecture.config import Router
from .router import Routes, first_choice

BALANCE_WEIGHT = 0.01
Z_WEIGHT = 1e-4


def routing_loss(routes: Iterable[Routes], policy: Router) -> torch.Tensor:
    """The weighted losses of all layers, summed. Experts that choose are always full and need no balance."""
    total = torch.zeros(())
    for layer in routes:
        total = total + Z_WEIGHT * z_loss(layer.logits)
        if policy == "tokens_choose":
            total = total + BALANCE_WEIGHT * balance_loss(layer.scores)
    return total


def balance_loss(scores: torch.Tensor) -> torch.Tensor:
    """``scores`` [G, T, E] to the mean over groups of ``E * sum_e f_e * p_e``; 1 where tokens are spread evenly.

    ``f`` is the share of tokens whose first choice is e, before capacity counts, and ``p`` the mean score of e.
    """
    experts = scores.shape[-1]
    chosen = torch.nn.functional.one_hot(first_choice(scores), experts).to(scores.dtype).mean(1)  # [G, E]
    return experts**2 * (chosen * scores.mean(1)).mean()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """``logits`` [G, T, E] to the mean over tokens of the squared log of their summed exponentials."""
    return logits.logsumexp(-1).square().mean()
