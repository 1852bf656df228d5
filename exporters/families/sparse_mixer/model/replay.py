"""A pass of a Sparse Mixer with routes that something else decided, and what its own scores say of them.

Shapes as in router.py: routes are [G, K, C] tokens (Experts Choose) or [G, T] experts (Tokens Choose).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .....errors import ParityError
from ....architecture import JudgedRoutes, Replay
from ....modules.top_tokens import indices_problem, repeated_token, taken
from ..architecture.capacity import Routing
from ..architecture.config import ROUTES
from .encoder import SparseMixer
from .moe import MoE
from .router import DROPPED, Routes
from .score_gaps import experts_gap, group_and_expert, holds, tokens_gap


def replay(model: SparseMixer, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]) -> Replay:
    """A pass of ``model`` with the routes ``given``, each judged by the scores behind the same routes.

    ``inputs`` are ids and, where there are several, types [B, S]. Raises ParityError for routes that no model of these
    shapes can make.
    """
    ids, types = inputs[0], inputs[1] if len(inputs) > 1 else None
    layers = {number: moe for number, moe in enumerate(layer.moe for layer in model.layers) if isinstance(moe, MoE)}
    names = {number: f"{ROUTES}{number}" for number in layers}
    if given.keys() != set(names.values()):
        raise ParityError(f"routes {', '.join(sorted(given)) or 'none'}: expected {', '.join(names.values())}")
    routing = {number: moe.routing(ids.numel()) for number, moe in layers.items()}
    for number, name in names.items():
        if problem := _problem(given[name], layers[number].config.router == "experts_choose", routing[number]):
            raise ParityError(f"{name}: {problem}")
    outputs, routes = model.routed(ids, types, {number: given[name] for number, name in names.items()})
    judged = {name: _judged(number, layers[number], routes[number], routing[number]) for number, name in names.items()}
    return Replay(outputs, judged)


def _problem(given: torch.Tensor, experts_choose: bool, routing: Routing) -> str | None:
    """Why no router of these shapes can take them, or None."""
    if experts_choose:
        shape, least, most = [routing.groups, routing.experts, routing.capacity], 0, routing.tokens - 1
    else:
        shape, least, most = [routing.groups, routing.tokens], DROPPED, routing.trained_experts - 1
    if problem := indices_problem(given, shape, least, most):
        return problem
    if experts_choose:
        return repeated_token(given, group_and_expert)
    held = holds(given, routing.trained_experts).sum(1)  # [G, E]
    for group, expert in (held > routing.capacity).nonzero().tolist():
        return f"group {group}, expert {expert}: took {int(held[group, expert])} tokens into {routing.capacity} slots"
    return None


def _judged(layer: int, moe: MoE, routes: Routes, routing: Routing) -> JudgedRoutes:
    chosen = routes.chosen
    if moe.config.router == "experts_choose":
        gap = experts_gap(routes.scores, chosen)
        took, own = (taken(indices, routing.tokens) for indices in (chosen, routes.own))  # [G, K, T]
        differing, routed, kept = int((took & ~own).sum()), routing.slots, int(took.any(1).sum())
    else:
        gap = tokens_gap(routes.scores, chosen, routing.capacity, moe.config.batch_prioritized)
        differing, routed = int((chosen != routes.own).sum()), int((chosen != DROPPED).sum())
        kept = routed
    shares = {
        "tokens_dropped": 1 - kept / (routing.groups * routing.tokens),
        "slots_used": routed / routing.slots,
        "mean_gate": float(routes.gates.sum()) / max(1, routed),
    }
    return JudgedRoutes(gap.value, f"layer {layer}, {gap.where}", chosen.numel(), differing, shares)
