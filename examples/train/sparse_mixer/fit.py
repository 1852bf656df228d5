"""Training of one model on masked bytes, and how good it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch.nn import functional

from ....exporters.families.sparse_mixer.model.encoder import SparseMixer
from ....exporters.families.sparse_mixer.model.losses import routing_loss
from ....exporters.families.sparse_mixer.model.router import DROPPED, Routes
from ..optimiser import decay_groups, linear_schedule
from ..stages import Record
from .masked_bytes import MaskedRows
from .recipe import Recipe

_BETAS = (0.9, 0.98)
_CLIP = 1.0  # norm of all gradients


def fit(
    model: SparseMixer,
    batches: Iterable[MaskedRows],
    recipe: Recipe,
    rate: float,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Trains ``model`` in place, one step a batch, on the cross-entropy of the hidden bytes and its routers' losses."""
    groups = decay_groups(model.named_parameters(), rate, recipe.decay)
    optimiser = torch.optim.AdamW(groups, betas=_BETAS, fused=True)
    schedule = linear_schedule(optimiser, recipe.steps)
    for step, batch in enumerate(batches, start=1):
        optimiser.zero_grad()
        torch.autograd.backward(loss(model, batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimiser.step()
        schedule.step()
        on_step(step, recipe.steps)


def loss(model: SparseMixer, rows: MaskedRows) -> torch.Tensor:
    """Mean cross-entropy in nats of the hidden bytes, and the losses of the routers, as their weights have them."""
    logits, routes = answers(model, rows)
    nats = functional.cross_entropy(logits.flatten(0, 1), rows.targets.flatten())
    return nats + routing_loss(routes.values(), model.config.router)


def answers(model: SparseMixer, rows: MaskedRows) -> tuple[torch.Tensor, dict[int, Routes]]:
    """Logits [N, K, V] of the chosen positions of ``rows``, and the routes by layer."""
    (logits,), routes = model.routed(rows.inputs, torch.zeros_like(rows.inputs))
    return logits.gather(1, rows.positions[..., None].expand(-1, -1, logits.shape[2])), routes


@torch.no_grad()
def quality(model: SparseMixer, rows: MaskedRows, batch: int) -> Record:
    """``accuracy`` and ``loss`` (nats) of the hidden bytes of all ``rows``, read ``batch`` at a time, and by layer of
    experts the share of tokens that none computed, ``dropped``."""
    nats, right = 0.0, 0
    shares: dict[str, list[float]] = defaultdict(list)
    for at in range(0, len(rows), batch):
        part = rows.part(at, at + batch)
        logits, routes = answers(model, part)
        nats += functional.cross_entropy(logits.flatten(0, 1), part.targets.flatten(), reduction="sum").item()
        right += int((logits.argmax(-1) == part.targets).sum())
        for layer, found in routes.items():
            shares[str(layer)].append(dropped_share(found))
    dropped = {layer: sum(found) / len(found) for layer, found in shares.items()}
    return {"accuracy": right / rows.targets.numel(), "loss": nats / rows.targets.numel(), "dropped": dropped}


def dropped_share(routes: Routes) -> float:
    """Share of the tokens that no expert computed."""
    groups, tokens = routes.scores.shape[:2]
    if routes.chosen.ndim == 2:  # [G, T], the expert of each token
        return float((routes.chosen == DROPPED).double().mean())
    taken = torch.zeros(groups, tokens, dtype=torch.bool).scatter_(1, routes.chosen.flatten(1), True)
    return 1 - float(taken.double().mean())
