"""The feed-forward part of experts: tokens are routed in groups, and every expert computes a fixed number of slots.

Shapes: ``B`` rows, ``S`` tokens, ``d`` hidden, ``f`` neurons of an expert; others as in router.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from ..architecture.capacity import Routing, routing_of
from ..architecture.config import SparseMixerConfig
from .router import Router, Routes, experts_choose, gates_of, tokens_choose


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


class MoE(torch.nn.Module):
    """Router and experts. A token that no expert computes is answered by exact zeros.

    ``percent`` (the capacity factor), ``group_size`` and ``kept`` (the first experts that answer) are the budget; with
    the shape of the input they fix groups and slots (capacity.py).
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
        """Of each expert, the rows [N] of the flattened tokens that it computes, and their gates [N]."""
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
