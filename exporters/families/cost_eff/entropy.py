"""Entropy of an exit's softmax, in a form that stays a number however certain the row is."""

from __future__ import annotations

import torch


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """``[..., C]`` logits to ``[...]`` entropies in nats, float32, within ``[0, ln C]`` up to rounding, for
    logits below 1e38.

    ``-sum(exp(s) * s)`` with ``s = z - max(z) - ln sum(exp(z - max(z)))``, the log of the softmax, which is finite:
    where a probability underflows, its term is ``0 * s = 0``, while ``p * ln p`` would be NaN and send the easiest rows
    through every layer. Few operations, since every exit computes them on a handful of numbers.
    """
    logs = logits.float().log_softmax(-1)  # [..., C]
    return -(logs.exp() * logs).sum(-1).clamp(max=0)
