"""How good every exit is on held-out texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....exporters.families.cost_eff.entropy import entropy
from ....exporters.families.cost_eff.model import CostEffModel
from .batches import Rows
from .losses import forward

_BATCH = 64
_CERTAIN_ENTROPY = 0.3  # nats: about 0.93 on one class


@dataclass(frozen=True)
class ExitQuality:
    """One exit: accuracy, mean entropy in nats, the share of texts with an entropy of at most 0.3 nats and the
    accuracy on those (None if there are none)."""

    layer: int
    accuracy: float
    entropy: float
    certain_share: float
    certain_accuracy: float | None


@torch.no_grad()
def exit_quality(model: CostEffModel, rows: Rows) -> list[ExitQuality]:
    """Quality of every exit on ``rows``, each text answered by every exit."""
    right: list[list[torch.Tensor]] = []
    uncertain: list[list[torch.Tensor]] = []
    for batch in rows.in_order(_BATCH):
        logits = forward(model, batch).logits
        right.append([answer.argmax(-1) == batch.labels for answer in logits])
        uncertain.append([entropy(answer) for answer in logits])
    columns = zip(model.architecture.exits.layers, zip(*right, strict=True), zip(*uncertain, strict=True), strict=True)
    return [_quality(layer, torch.cat(hits), torch.cat(nats)) for layer, hits, nats in columns]


def _quality(layer: int, right: torch.Tensor, nats: torch.Tensor) -> ExitQuality:
    certain = right[nats <= _CERTAIN_ENTROPY]
    return ExitQuality(
        layer,
        round(right.float().mean().item(), 4),
        round(nats.mean().item(), 4),
        round(len(certain) / len(right), 4),
        round(certain.float().mean().item(), 4) if len(certain) else None,
    )


def majority(train: Sequence[int], held_out: Sequence[int]) -> float:
    """Accuracy on ``held_out`` of always answering the commonest label of ``train``, the lowest of equals."""
    commonest = max(sorted(set(train)), key=list(train).count)
    return round(list(held_out).count(commonest) / len(held_out), 4)
