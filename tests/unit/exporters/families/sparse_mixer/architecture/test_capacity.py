from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.errors import PlanError
from nestforge.exporters.families.sparse_mixer.config import (
    Routing,
    capacity,
    routing,
    token_groups,
)
from nestforge.exporters.families.sparse_mixer.ops import elastic_spec
from nestforge.exporters.families.sparse_mixer.presets import PRESETS
from support.tiny_mixer import mixer_config

BASE = PRESETS["sparse-mixer-base"]


@pytest.mark.parametrize(
    ("tokens", "slots"),
    [(4096, (256, 192, 128)), (2048, (128, 96, 64)), (512, (32, 24, 16)), (128, (8, 6, 4))],
)
def test_slots_of_16_experts_as_the_reference_has_them(tokens: int, slots: tuple[int, ...]) -> None:
    assert tuple(capacity(BASE, percent, tokens) for percent in (100, 75, 50)) == slots


def test_halves_round_to_the_even_number_and_the_floor_raises_them() -> None:
    unfloored = mixer_config(num_experts=16, min_capacity=0)
    assert [capacity(unfloored, 100, tokens) for tokens in (40, 56, 24)] == [2, 4, 2]  # 2.5, 3.5, 1.5
    assert capacity(BASE, 100, 40) == 4


@pytest.mark.parametrize(("rounding", "slots"), [("half_even", 2), ("floor", 2), ("ceil", 3)])
def test_rounding_is_the_one_that_is_stated(rounding: str, slots: int) -> None:
    assert capacity(mixer_config(capacity_rounding=rounding), 100, 10) == slots  # 10 / 4 experts


def test_an_expert_never_has_more_slots_than_its_group_has_tokens() -> None:
    assert capacity(BASE, 100, 3) == 3, "the floor of 4 is above the group"
    assert capacity(mixer_config(num_experts=2, capacity_factor=2.0), 200, 8) == 8


@pytest.mark.parametrize(
    ("tokens", "group_size", "groups"),
    [
        (512, 4096, 1),
        (32_768, 4096, 8),  # the paper's 64 sequences
        (6000, 4096, 1),  # one group, larger than its size
        (1024, 300, 4),  # 3 do not divide
        (7, 2, 7),  # a prime has groups of one token alone
    ],
)
def test_groups(tokens: int, group_size: int, groups: int) -> None:
    assert token_groups(tokens, group_size) == groups


@given(tokens=st.integers(1, 3000), group_size=st.integers(1, 5000))
def test_groups_are_the_least_that_divide(tokens: int, group_size: int) -> None:
    groups = token_groups(tokens, group_size)
    least = max(1, tokens // group_size)
    assert tokens % groups == 0
    assert all(tokens % fewer for fewer in range(least, groups))


@given(
    tokens=st.integers(1, 5000),
    percents=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    rounding=st.sampled_from(["half_even", "floor", "ceil"]),
    floor=st.integers(0, 8),
)
def test_a_lower_capacity_has_no_more_slots_and_none_exceeds_the_group(
    tokens: int, percents: tuple[int, int], rounding: str, floor: int
) -> None:
    config = mixer_config(capacity_rounding=rounding, min_capacity=floor)
    low, high = (capacity(config, percent, tokens) for percent in sorted(percents))
    assert 0 <= low <= high <= tokens


def test_a_submodel_has_the_routing_of_its_values() -> None:
    spec = elastic_spec(BASE)
    assert routing(BASE, spec.universal(), Bucket(8, 512)) == Routing(100, 1, 4096, 256, 16, 16)
    smaller = spec.submodel({"moe.capacity_factor": 50, "moe.group_size": 512, "moe.experts": 4})
    assert routing(BASE, smaller, Bucket(8, 512)) == Routing(50, 8, 512, 16, 4, 16)


def test_a_capacity_without_slots_is_refused() -> None:
    config = mixer_config(min_capacity=0)
    quarter = elastic_spec(config).submodel({"moe.capacity_factor": 25})
    assert routing(config, quarter, Bucket(1, 16)).capacity == 1
    message = (
        "bucket b1-s8: 25 % of 8 tokens over 4 experts rounds to 0 slots (half_even, min_capacity 0); raise "
        "moe.capacity_factor (`levels`) or the bucket"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        routing(config, quarter, Bucket(1, 8))
