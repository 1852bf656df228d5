"""A pass of a Sparse Mixer with routes that something else decided, and what its own scores say of them.

Shapes as in moe.py: routes are [G, K, C] tokens (Experts Choose) or [G, T] experts (Tokens Choose). A score gap says by
how much routes are worse than the ones that the scores call for: 0 for the router's own, little for a near tie, in
units of the scores, which are probabilities over experts; routes are possible ones: no token twice in an expert, no
expert beyond its slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ....errors import ParityError
from ...architecture import JudgedRoutes, Replay
from ...modules.top_tokens import ScoreGap, indices_problem, ranking_gap, repeated_token, shown, taken, worst
from .config import ROUTES, Routing
from .model import SparseMixer
from .moe import DROPPED, MoE, Routes


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


def experts_gap(scores: torch.Tensor, chosen: torch.Tensor) -> ScoreGap:
    """Score gaps of ``chosen`` [G, K, C], the tokens of each expert by falling score, under ``scores`` [G, T, E].

    By how much a token stands behind, or is left out for, one that scores less.
    """
    by_expert = scores[..., : chosen.shape[1]].transpose(1, 2)  # [G, K, T]
    return ranking_gap(by_expert, chosen, group_and_expert)


def group_and_expert(index: tuple[int, ...]) -> str:
    """Units of the first two dimensions of the routes of Experts Choose."""
    group, expert = index
    return f"group {group}, expert {expert}"


def tokens_gap(scores: torch.Tensor, chosen: torch.Tensor, capacity: int, prioritized: bool) -> ScoreGap:
    """Score gaps of ``chosen`` [G, T], the expert of each token or DROPPED, under ``scores`` [G, T, E].

    A token that an expert computes: by how much another expert scores higher. A dropped one: the least by which an
    expert without a free slot may lie below its best, or, where tokens are ``prioritized``, above one that has a slot
    there; infinite where no expert is full (without priorities: of tokens before it).
    """
    best, first = scores.max(-1)  # [G, T]
    missed = best[..., None] - scores  # [G, T, E]
    kept = holds(chosen, scores.shape[-1])  # [G, T, E]
    full = kept.sum(1, keepdim=True) == capacity  # [G, 1, E]
    if prioritized:
        lowest = scores.masked_fill(~kept, torch.inf).amin(1, keepdim=True)  # [G, 1, E]
        refusal = torch.maximum(missed, scores - lowest)
    else:
        before = kept.cumsum(1) - kept.long()
        refusal = missed.masked_fill(before < capacity, torch.inf)
    refusal = refusal.masked_fill(~full, torch.inf).amin(-1)  # [G, T]
    expert = chosen.clamp(min=0)
    worse = torch.where(chosen == DROPPED, refusal, missed.gather(-1, expert[..., None])[..., 0])
    group, token = worst(worse)
    own, taken = int(first[group, token]), int(chosen[group, token])
    wanted = f"expert {own} ({shown(best[group, token])})"
    if taken == DROPPED:
        done = f"was dropped, its best is {wanted}"
    else:
        done = f"went to expert {taken} ({shown(scores[group, token, taken])}), its best is {wanted}"
    return ScoreGap(float(worse[group, token]), f"group {group}, token {token} {done}")


def holds(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """``chosen`` [G, T] to [G, T, E]: whether an expert computes a token."""
    return chosen[..., None] == torch.arange(experts)
