"""The feed-forward part of experts: tokens are routed in groups, and every expert computes a fixed number of slots.

Experts Choose, or Tokens Choose top-1 with Batch Prioritized Routing. Shapes: ``B`` rows, ``S`` tokens, ``d`` hidden,
``f`` neurons of an expert; ``G`` groups, ``T`` tokens of a group, ``E`` experts that are scored, ``K`` that are kept,
``C`` slots of an expert. Equal scores fall to the lower index, of tokens as of experts, in torch as in every engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from ...modules.top_tokens import highest
from .config import Router as Policy
from .config import Routing, SparseMixerConfig, routing_of

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
