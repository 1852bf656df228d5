"""Entropy of an exit's softmax, in a form that stays a number however certain the row is."""

from __future__ import annotations

import torch


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """``[..., C]`` logits to ``[...]`` entropies in nats, float32, within ``[0, ln C]`` up to rounding, for
    logits below 1e38.

    ``ln sum(e) - sum(e * s) / sum(e)`` with ``s = z - max(z)`` and ``e = exp(s)``: where a probability underflows, its
    term is ``0 * s = 0``, while ``p * ln p`` would be NaN and send the easiest rows through every layer.
    """
    shifted = logits.float() - logits.float().amax(-1, keepdim=True)  # [..., C]
    weights = shifted.exp()
    total = weights.sum(-1)
    return (total.log() - (weights * shifted).sum(-1) / total).clamp(min=0)
