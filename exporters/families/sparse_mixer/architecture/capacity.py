"""Token groups and expert capacity: static numbers of an engine, from configuration, submodel and bucket (no torch).

Groups: ``max(1, floor(tokens / group_size))``, raised until it divides the tokens, so that a group may be larger than
``group_size`` (Sparse Mixers, reference code). Capacity: ``capacity_factor * tokens / experts`` rounded, at least
``min_capacity``, at most the tokens of a group. ``experts`` are all that were trained, whatever a submodel keeps: an
expert then has the slots that it had among all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from .....bucket import Bucket
from .....elastic import Submodel
from .....errors import PlanError
from .config import CAPACITY, EXPERTS, GROUP, SparseMixerConfig

_ROUNDINGS: Mapping[str, Callable[[Fraction], int]] = {"half_even": round, "floor": floor, "ceil": ceil}


@dataclass(frozen=True)
class Routing:
    """Static routing of one engine: ``groups`` of ``tokens``, where each of ``experts`` has ``capacity`` slots.

    ``trained_experts`` are the experts that the router scores, ``percent`` is the capacity factor that was asked for.
    """

    percent: int
    groups: int
    tokens: int
    capacity: int
    experts: int
    trained_experts: int

    @property
    def slots(self) -> int:
        """Slots of all experts in all groups: what they compute, full or not."""
        return self.groups * self.experts * self.capacity


def routing(config: SparseMixerConfig, submodel: Submodel, bucket: Bucket) -> Routing:
    """The routing of ``submodel`` at ``bucket`` (its own: ``submodel.at(bucket)``). Raises PlanError for no slots."""
    chosen = {axis.name: value for axis, value in submodel.values}
    percent = chosen.get(CAPACITY, config.trained_capacity)
    group_size = chosen.get(GROUP, config.group_size)
    experts = chosen.get(EXPERTS, config.num_experts)
    try:
        return routing_of(config, bucket.tokens, percent, group_size, experts)
    except PlanError as failure:
        raise PlanError(f"bucket {bucket.label}: {failure}; raise {CAPACITY} (`levels`) or the bucket") from failure


def routing_of(config: SparseMixerConfig, tokens: int, percent: int, group_size: int, experts: int) -> Routing:
    """The routing of ``tokens`` in all to the first ``experts``. Raises PlanError for no slots."""
    groups = token_groups(tokens, group_size)
    slots = capacity(config, percent, tokens // groups)
    if slots < 1:
        raise PlanError(
            f"{percent} % of {tokens // groups} tokens over {config.num_experts} experts rounds to 0 slots "
            f"({config.capacity_rounding}, min_capacity {config.min_capacity})"
        )
    return Routing(percent, groups, tokens // groups, slots, experts, config.num_experts)


def token_groups(tokens: int, group_size: int) -> int:
    """How many groups ``tokens`` fall into: the least number from ``tokens // group_size`` on that divides them."""
    groups = max(1, tokens // group_size)
    while tokens % groups:
        groups += 1
    return groups


def capacity(config: SparseMixerConfig, percent: int, tokens: int) -> int:
    """Slots per expert in a group of ``tokens``, at a capacity factor of ``percent``."""
    exact = Fraction(percent * tokens, 100 * config.num_experts)
    return min(max(_ROUNDINGS[config.capacity_rounding](exact), config.min_capacity), tokens)
