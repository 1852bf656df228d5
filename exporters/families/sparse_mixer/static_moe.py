"""Experts as engines compute them: the same function as ``MoE``, in static shapes and in the variants that were chosen.

No variant finds out which tokens an expert has by asking every token (NonZero), and none adds rows that may meet. Both
routers end in one TopK per expert: where tokens choose, over the scores of those tokens alone that chose the expert,
so that an expert's slots are filled in the order of service; what is left of them holds tokens at a gate of zero.
A token is at most once among an expert's rows, but may be among those of several experts.

Products are ``per_expert``, each a Gemm over a row of the stacked weights, or ``batched`` over the stack: one MatMul,
whose weights ONNX Runtime packs at every run. Dispatch is by ``gather`` or ``one_hot``. The combine variants:

1. ``scatter``: experts in turn read their rows of the answer, add to them and write them back. One expert's rows never
   meet, so this is a plain ScatterND. With ``reduction="add"`` over all experts at once it would be one operation: that
   one loses updates in ONNX Runtime 1.31 when more than one thread runs, and TensorRT refuses or ignores it.
2. ``gather``: per expert, every token reads the slot that it has there, or a row of zeros.
3. ``one_hot``: a product with the matrix of who has which slot, as the reference does it.

Shapes: ``G`` groups of ``T`` tokens, ``K`` experts that are kept, ``C`` slots, ``N = G * C`` rows of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from ...onnx_translations import add_rows, one_hot, table_rows
from .config import capacity, token_groups
from .moe import DROPPED, MoE, Routes

# The score of a token that chose another expert: below every softmax.
_SCORE_OF_NOT_ASKED = -1.0


class StaticMoE(torch.nn.Module):
    """``moe`` in the variants ``moe.dispatch``, ``moe.products`` and ``moe.combine``, on the same parameters."""

    def __init__(self, moe: MoE, variants: Mapping[str, str]) -> None:
        super().__init__()
        self.config, self.router = moe.config, moe.router
        self.percent, self.group_size, self.kept = moe.percent, moe.group_size, moe.kept
        self.experts = moe.experts
        self.dispatch, self.products, self.combine = (
            variants[f"moe.{part}"] for part in ("dispatch", "products", "combine")
        )

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> tuple[torch.Tensor, Routes]:
        """``x`` [B, S, d] to the answer [B, S, d] and the routes, as ``MoE`` returns them."""
        if given is not None:
            raise ValueError("a static variant takes its own routes")
        groups = token_groups(x.shape[0] * x.shape[1], self.group_size)
        tokens = x.reshape(groups, -1, x.shape[2])  # [G, T, d]
        logits = self.router(tokens)
        scores = logits.softmax(-1)  # [G, T, E]
        slots = capacity(self.config, self.percent, tokens.shape[1])
        if self.config.router == "experts_choose":
            gates, places = scores[..., : self.kept].transpose(1, 2).topk(slots, dim=-1)  # [G, K, C]
            chosen, decided = places, gates
        else:
            gates, places, first, best = self._asked(scores, slots)
        inverse = _inverse(places, tokens.shape[1]) if self._needs_inverse else None
        if self.config.router == "tokens_choose":
            assert inverse is not None
            inverse = inverse.gather(1, first[:, None])  # [G, 1, T]: a token has one expert
            dropped = inverse[:, 0] == places[0].numel()
            chosen = torch.where(dropped, DROPPED, first)
            decided = torch.where(dropped, 0.0, best)
        computed = self._computed(self._dispatched(tokens, places))
        answer = self._combined(computed, places, gates, inverse, tokens)
        return answer.reshape(x.shape), Routes(logits, scores, chosen, chosen, decided)

    @property
    def _needs_inverse(self) -> bool:
        return self.combine == "gather" or self.config.router == "tokens_choose"

    def _asked(self, scores: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where tokens choose: gates and places [G, K, C] of every expert, and of every token its expert and score."""
        best, first = scores.max(-1)  # [G, T]
        experts = torch.arange(scores.shape[-1])[:, None]
        asked = first[:, None] == experts  # [G, E, T]
        order = best if self.config.batch_prioritized else -torch.arange(1.0, scores.shape[1] + 1).expand_as(best)
        below = _SCORE_OF_NOT_ASKED if self.config.batch_prioritized else -float(scores.shape[1] + 1)
        found, places = torch.where(asked, order[:, None], below).topk(slots, dim=-1)  # [G, E, C]
        served = best[:, None].expand(-1, scores.shape[-1], -1).gather(-1, places)
        return torch.where(found > below, served, 0.0), places, first, best

    def _dispatched(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """``tokens`` [G, T, d] as experts read them: [K, N, d]."""
        groups, experts, slots = places.shape
        if self.dispatch == "one_hot":
            read = one_hot(places.flatten(1), tokens.shape[1]) @ tokens  # [G, K * C, d]
            return _by_expert(read.view(groups, experts, slots, -1))
        rows = _rows(places, tokens.shape[1])  # [K, N]
        return functional.embedding(rows, tokens.flatten(0, 1))

    def _computed(self, read: torch.Tensor) -> list[torch.Tensor]:
        """``read`` [K, N, d] to what each expert makes of its rows [N, d]."""
        experts = self.experts
        if self.products == "per_expert":
            return [experts.compute(number, rows) for number, rows in enumerate(_pieces(read))]
        inner = read @ experts.up_weight + experts.up_bias[:, None]  # [K, N, f]
        inner = functional.gelu(inner, approximate="tanh")
        return _pieces(inner @ experts.down_weight + experts.down_bias[:, None])

    def _combined(
        self,
        computed: Sequence[torch.Tensor],
        places: torch.Tensor,
        gates: torch.Tensor,
        inverse: torch.Tensor | None,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """``computed``, per expert [N, d], weighted by ``gates`` and summed per token, from the first expert on."""
        if self.combine == "scatter":
            by_expert = _pieces(_by_expert(gates[..., None]))  # K times [N, 1]
            weighted = [values * gate for values, gate in zip(computed, by_expert, strict=True)]
            return _scattered(weighted, _rows(places, tokens.shape[1]), tokens)
        by_slot = _by_group(torch.stack(list(computed)), places.shape[0]) * gates.flatten(1)[..., None]  # [G, K * C, d]
        if self.combine == "one_hot":
            return one_hot(places.flatten(1), tokens.shape[1]).transpose(1, 2) @ by_slot
        assert inverse is not None
        return _gathered(by_slot, inverse)


def _rows(places: torch.Tensor, tokens: int) -> torch.Tensor:
    """``places`` [G, K, C] in groups of ``tokens`` as rows of all tokens, by expert: [K, N]."""
    return _by_expert(table_rows(places, tokens))


def _by_expert(values: torch.Tensor) -> torch.Tensor:
    """[G, K, C, ...] to [K, N, ...]."""
    return values.transpose(0, 1).flatten(1, 2)


def _pieces(values: torch.Tensor) -> list[torch.Tensor]:
    """[K, N, ...] to K times [N, ...]."""
    return list(torch.split(values.flatten(0, 1), values.shape[1]))


def _by_group(values: torch.Tensor, groups: int) -> torch.Tensor:
    """[K, N, d] to [G, K * C, d]."""
    experts, rows, width = values.shape
    return values.reshape(experts, groups, rows // groups, width).transpose(0, 1).flatten(1, 2)


def _inverse(places: torch.Tensor, tokens: int) -> torch.Tensor:
    """``places`` [G, K, C] to [G, K, T]: the slot, of all ``K * C``, that a token has at an expert, or ``K * C``."""
    groups, experts, slots = places.shape
    numbers = torch.arange(experts * slots).view(1, experts, slots).expand_as(places)
    nowhere = torch.full((groups, experts, tokens), experts * slots)
    return nowhere.scatter(2, places, numbers)


def _scattered(weighted: Sequence[torch.Tensor], rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``weighted``, per expert [N, d], added to its ``rows`` [K, N] of an answer [G * T, d]."""
    answer = torch.zeros_like(tokens).flatten(0, 1)
    for row, values in zip(_pieces(rows), weighted, strict=True):
        answer = add_rows(answer, row, values)
    return answer


def _gathered(by_slot: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``by_slot`` [G, K * C, d] read by ``inverse`` [G, K, T], or [G, 1, T] where a token has one expert at most."""
    slots = by_slot.shape[1]
    table = torch.cat([by_slot, torch.zeros_like(by_slot[:, :1])], dim=1).flatten(0, 1)  # [G * (K * C + 1), d]
    inverse = table_rows(inverse, slots + 1)
    answer: torch.Tensor | None = None
    for places in _pieces(inverse.transpose(0, 1).flatten(1)):  # [G * T]
        read = functional.embedding(places, table)
        answer = read if answer is None else answer + read
    assert answer is not None
    return answer
