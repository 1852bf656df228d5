"""The feed-forward part of experts: tokens are routed in groups, and every expert computes a fixed number of slots.

Experts Choose, or Tokens Choose top-1 with Batch Prioritized Routing. Shapes: ``B`` rows, ``S`` tokens, ``d`` hidden,
``f`` neurons of an expert; ``G`` groups, ``T`` tokens of a group, ``E`` experts that are scored, ``K`` that are kept,
``C`` slots of an expert. Equal scores fall to the lower index, of tokens as of experts, in torch as in every engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ...modules.top_tokens import highest
from ...onnx_translations import add_rows, one_hot, table_rows
from .config import Router as Policy
from .config import Routing, SparseMixerConfig, capacity, routing_of, token_groups

DROPPED = -1


class MoE(torch.nn.Module):
    """Router and experts. A token that no expert computes is answered by exact zeros.

    ``percent`` (the capacity factor), ``group_size`` and ``kept`` (the first experts that answer) are the budget; with
    the shape of the input they fix groups and slots (``routing_of``).
    """

    def __init__(self, config: SparseMixerConfig) -> None:
        super().__init__()
        self.config = config
        self.percent, self.group_size, self.kept = config.trained_capacity, config.group_size, config.num_experts
        self.router = Router(config.hidden_size, config.num_experts)
        self.experts = Experts(config.num_experts, config.hidden_size, config.expert_width)

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> tuple[torch.Tensor, Routes]:
        """``x`` [B, S, d] to the answer [B, S, d] and the routes; ``given`` replaces the router's own."""
        routes = self.route(x, given)
        tokens = x.flatten(0, 1)  # [G * T, d]
        answer = torch.zeros_like(tokens)
        for expert, rows, gates in self._slots(routes):  # rising experts, so that sums have one order
            computed = self.experts.compute(expert, tokens[rows]) * gates[:, None].to(x.dtype)
            answer.index_add_(0, rows, computed)
        return answer.view_as(x), routes

    def route(self, x: torch.Tensor, given: torch.Tensor | None = None) -> Routes:
        """The routes of ``x`` [B, S, d]. ``given`` are possible routes, in the shape of the router's own.

        Raises PlanError where an expert would have no slot.
        """
        routing = self.routing(x.shape[0] * x.shape[1])
        logits = self.router(x.reshape(routing.groups, routing.tokens, x.shape[2]))  # [G, T, E]
        scores = logits.softmax(-1)
        if self.config.router == "experts_choose":
            own = experts_choose(scores, routing.capacity, self.kept)
        else:
            own = tokens_choose(scores, routing.capacity, self.config.batch_prioritized)
        chosen = own if given is None else given
        return Routes(logits, scores, own, chosen, gates_of(scores, chosen, self.config.router))

    def routing(self, tokens: int) -> Routing:
        """Groups and slots of ``tokens`` in all. Raises PlanError where an expert would have no slot."""
        return routing_of(self.config, tokens, self.percent, self.group_size, self.kept)

    def _slots(self, routes: Routes) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """The rows [N] of each expert of the flattened tokens that it computes, and their gates [N]."""
        chosen = routes.chosen
        if self.config.router == "experts_choose":
            start = torch.arange(chosen.shape[0], device=chosen.device) * routes.scores.shape[1]
            rows = chosen + start[:, None, None]  # [G, K, C]
            for expert in range(chosen.shape[1]):
                yield expert, rows[:, expert].flatten(), routes.gates[:, expert].flatten()
            return
        flat, gates = chosen.flatten(), routes.gates.flatten()  # [G * T]
        for expert in range(self.config.num_experts):
            (rows,) = (flat == expert).nonzero(as_tuple=True)
            yield expert, rows, gates[rows]


class Experts(torch.nn.Module):
    """The weights of all experts, stacked: ``up_weight`` [E, d, f], ``up_bias`` [E, f], ``down_weight`` [E, f, d],
    ``down_bias`` [E, d]."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.up_weight = torch.nn.Parameter(torch.empty(experts, hidden, width))
        self.up_bias = torch.nn.Parameter(torch.empty(experts, width))
        self.down_weight = torch.nn.Parameter(torch.empty(experts, width, hidden))
        self.down_bias = torch.nn.Parameter(torch.empty(experts, hidden))

    def compute(self, expert: int, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` [N, d] through one expert, to [N, d]. Not ``forward``: one pass of a layer has many answers."""
        inner = torch.addmm(self.up_bias[expert], tokens, self.up_weight[expert])  # [N, f]
        inner = functional.gelu(inner, approximate="tanh")
        return torch.addmm(self.down_bias[expert], inner, self.down_weight[expert])


class Router(torch.nn.Linear):
    """Scores every token for every expert, in float32 or better whatever the rest computes in: rounding makes ties."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` [G, T, d] to logits [G, T, E]."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        return functional.linear(tokens.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


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


# The score of a token that chose another expert: below every softmax.
_SCORE_OF_NOT_CHOSEN = -1.0


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
            gates, places, first, best = self._tokens_choose(scores, slots)
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

    def _tokens_choose(
        self, scores: torch.Tensor, slots: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where tokens choose: gates and places [G, K, C] of every expert, and of every token its expert and score."""
        best, first = scores.max(-1)  # [G, T]
        experts = torch.arange(scores.shape[-1])[:, None]
        chosen = first[:, None] == experts  # [G, E, T]
        order = best if self.config.batch_prioritized else -torch.arange(1.0, scores.shape[1] + 1).expand_as(best)
        below = _SCORE_OF_NOT_CHOSEN if self.config.batch_prioritized else -float(scores.shape[1] + 1)
        found, places = torch.where(chosen, order[:, None], below).topk(slots, dim=-1)  # [G, E, C]
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
