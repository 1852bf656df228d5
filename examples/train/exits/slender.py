"""Makes a model thinner: fewer heads and channels per layer, a word embedding of smaller rank; and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ....exporters.families.cost_eff.architecture import Widths
from ....exporters.families.cost_eff.model import CostEffModel
from ....exporters.families.cost_eff.tsvd import factorise
from .importance import Importance


@dataclass(frozen=True)
class Target:
    """Widths of every layer and the rank of the word embedding."""

    heads: int
    ffn: int
    rank: int


def schedule(whole: Target, final: Target, steps: int) -> list[Target]:
    """The widths after each of ``steps`` equal steps from ``whole`` to ``final``, rounded down, the last ``final``."""

    def at(step: int, start: int, end: int) -> int:
        return start - -(-(start - end) * step // steps)

    return [
        Target(at(step, whole.heads, final.heads), at(step, whole.ffn, final.ffn), at(step, whole.rank, final.rank))
        for step in range(1, steps + 1)
    ]


def most_important(importance: Importance, target: Target) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Ids that stay, per layer and ascending: heads, channels. Of equal ones the first stay."""

    def best(scores: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
        orders = (torch.argsort(layer, descending=True, stable=True) for layer in scores)
        return [order[:count].sort().values for order in orders]

    return best(importance.heads, target.heads), best(importance.ffn, target.ffn)


def slender(
    model: CostEffModel, heads: Sequence[torch.Tensor], channels: Sequence[torch.Tensor], rank: int
) -> CostEffModel:
    """A copy of ``model`` with these heads and channels of every layer, and its word embedding at ``rank``.

    The embedding is multiplied out, if it is factorised already, and factorised again. Heads and channels that
    contributed nothing may go without any change of the function; a rank below the embedding's own changes it.
    """
    d = model.architecture.head_size
    weights = {name: data.detach() for name, data in model.state_dict().items()}
    for index, (kept_heads, kept) in enumerate(zip(heads, channels, strict=True)):
        at = f"encoder.layer.{index}"
        rows = (kept_heads[:, None] * d + torch.arange(d)).flatten()
        for part in ("query", "key", "value"):
            for kind in ("weight", "bias"):
                weights[f"{at}.attention.self.{part}.{kind}"] = weights[f"{at}.attention.self.{part}.{kind}"][rows]
        for name, dim, ids in (
            ("attention.output.dense.weight", 1, rows),
            ("intermediate.dense.weight", 0, kept),
            ("intermediate.dense.bias", 0, kept),
            ("output.dense.weight", 1, kept),
        ):
            weights[f"{at}.{name}"] = weights[f"{at}.{name}"].index_select(dim, ids)
    words, projection = factorise(word_embedding(model), rank)
    weights["embeddings.word_embeddings.weight"] = words
    weights["embeddings.word_projection.weight"] = projection.T.contiguous()
    widths = tuple(Widths(len(h), len(f)) for h, f in zip(heads, channels, strict=True))
    thinner = CostEffModel(replace(model.architecture, layers=widths, stored=widths, rank=rank))
    thinner.load_state_dict(weights)
    return thinner


def word_embedding(model: CostEffModel) -> torch.Tensor:
    """The word embedding ``[V, H]``, multiplied out if it is factorised."""
    table, projection = model.embeddings.word_embeddings.weight, model.embeddings.word_projection
    return (table if projection is None else table @ projection.weight.T).detach()
