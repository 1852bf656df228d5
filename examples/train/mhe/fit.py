"""Training of one model on bytes, hidden ones of an encoder and next ones of a decoder, and how good it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn import functional

from ..matformer.data import Rows
from ..optimiser import decay_groups, linear_schedule
from ..sparse_mixer.masked_bytes import MaskedRows
from ..stages import Record
from .recipe import Recipe

_BETAS = (0.9, 0.98)
_CLIP = 1.0  # norm of all gradients


def fit(
    model: torch.nn.Module,
    batches: Iterable[MaskedRows | Rows],
    recipe: Recipe,
    rate: float,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Trains ``model`` in place, one step a batch with ``rate``, on the mean cross-entropy of what it is asked for."""
    optimiser = torch.optim.AdamW(decay_groups(model.named_parameters(), rate, recipe.decay), betas=_BETAS, fused=True)
    schedule = linear_schedule(optimiser, recipe.steps)
    for step, batch in enumerate(batches, start=1):
        optimiser.zero_grad()
        logits = answers(model, batch)
        torch.autograd.backward(functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimiser.step()
        schedule.step()
        on_step(step, recipe.steps)


def answers(model: torch.nn.Module, rows: MaskedRows | Rows) -> torch.Tensor:
    """Logits ``[N, K, V]`` for the targets of ``rows``: of hidden bytes, or of every next one."""
    if isinstance(rows, Rows):
        following: torch.Tensor = model(rows.inputs)
        return following
    logits: torch.Tensor = model(rows.inputs, torch.ones_like(rows.inputs))
    return logits.gather(1, rows.positions[..., None].expand(-1, -1, logits.shape[2]))


@torch.no_grad()
def quality(model: torch.nn.Module, parts: Iterable[MaskedRows | Rows]) -> Record:
    """``accuracy`` and ``loss`` (nats a byte) of what ``parts`` ask for."""
    nats, right, asked = 0.0, 0, 0
    for part in parts:
        logits = answers(model, part)
        nats += functional.cross_entropy(logits.flatten(0, 1), part.targets.flatten(), reduction="sum").item()
        right += int((logits.argmax(-1) == part.targets).sum())
        asked += part.targets.numel()
    return {"accuracy": right / asked, "loss": nats / asked}
