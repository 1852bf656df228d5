"""Tests."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.errors import CheckpointError, PlanError
from nestforge.exporters.checkpoints.own_folder import config_from_json
from nestforge.exporters.families.sparse_mixer.config import (
    CAPACITY,
    EXPERTS,
    GROUP,
    Routing,
    SparseMixerConfig,
    capacity,
    routing,
    token_groups,
)
from nestforge.exporters.families.sparse_mixer.ops import elastic_spec
from nestforge.exporters.families.sparse_mixer.presets import PRESETS
from support.tiny_mixer import TINY_MIXER, mixer_config

STATED = {"model_type": "sparse_mixer", **json.loads(json.dumps(TINY_MIXER))}


def read(**changes: Any) -> SparseMixerConfig:
    data = {key: value for key, value in {**STATED, **changes}.items() if value is not ...}
    return config_from_json(SparseMixerConfig, data, "config.json")


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_reads_back(name: str) -> None:
    assert config_from_json(SparseMixerConfig, json.loads(json.dumps(PRESETS[name].to_json())), "here") == PRESETS[name]


def test_widths_follow_from_others_where_they_are_not_stated() -> None:
    assert (read().head_dim, read().embedding_width, read().expert_width) == (8, 16, 24)
    assert (read(embedding_size=8).embedding_width, read(expert_intermediate_size=...).expert_width) == (8, 32)


def test_a_layer_mixes_or_attends_and_is_dense_or_routes_independently() -> None:
    config = read()
    assert [config.mixes(layer) for layer in range(4)] == [True, True, False, False]
    assert [config.routes(layer) for layer in range(4)] == [False, True, True, False]
    assert config.some_mix
    assert not read(attention_layers=[0, 1, 2, 3]).some_mix


@pytest.mark.parametrize(
    ("head", "tokens", "classes", "pools"),
    [
        ("none", False, False, True),
        ("masked_lm", True, False, False),
        ("classifier", False, True, True),
        ("pretraining", True, True, True),
    ],
)
def test_heads(head: str, tokens: bool, classes: bool, pools: bool) -> None:
    config = read(head=head, num_labels=2 if classes else ...)
    assert (config.predicts_tokens, config.classifies, config.pools) == (tokens, classes, pools)


def test_what_is_offered_where_nothing_is_stated() -> None:
    assert read().choices == {CAPACITY: (25, 50, 75, 100), GROUP: (16, 4096), EXPERTS: (1, 2, 3, 4)}
    assert read(router="tokens_choose").choices.keys() == {CAPACITY, GROUP}
    assert read(capacity_factor=0.5).choices[CAPACITY] == (25, 50)
    assert read(capacity_factor=1.25).choices[CAPACITY] == (25, 50, 75, 100, 125)
    assert GROUP not in read(group_size=16).choices, "one value is no axis"


def test_what_is_offered_as_stated() -> None:
    config = read(capacities=[40, 60], group_sizes=[8, 32], expert_counts=[3, 4], capacity_factor=0.8)
    assert config.choices == {CAPACITY: (40, 60, 80), GROUP: (8, 32, 4096), EXPERTS: (3, 4)}
    assert read(capacities=[100], group_sizes=[4096], expert_counts=[4]).choices == {}


def test_sequences_are_offered_where_mixing_has_matrices_for_them() -> None:
    dense = {"moe_layers": [], "num_experts": 0, "expert_intermediate_size": ...}
    offered = {
        mixing: read(mixing=mixing, **dense).choices.get("sequence")
        for mixing in ("linear", "circulant", "toeplitz", "fourier", "hartley", "hartley_plus", "hartley_separable")
    }
    assert {mixing for mixing, values in offered.items() if values is None} == {"linear", "circulant"}
    assert {values for values in offered.values() if values is not None} == {(4, 8, 16)}
    assert read(mixing="fourier", sequences=[6], **dense).choices == {"sequence": (6, 16)}
    assert read(mixing="fourier", attention_layers=[0, 1, 2, 3], **dense).choices == {}


def test_what_other_tools_write_beside_is_no_mistake() -> None:
    assert read(architectures=["SparseMixer"], _name_or_path="somewhere") == mixer_config()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mixings": "linear"}, "unknown key 'mixings'; did you mean 'mixing'?"),
    ({"vocab_size": ...}, "missing key 'vocab_size'"),
    ({"mixing": "hartly"}, "mixing: got 'hartly'; did you mean 'hartley'?"),
    ({"router": "token_choose"}, "router: got 'token_choose'; did you mean 'tokens_choose'?"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 1024, got 1000000000"),
    ({"hidden_size": 15}, "hidden_size: 15 is no multiple of num_attention_heads 2"),
    ({"attention_layers": [2, 4]}, "attention_layers: expected rising numbers from 0 to 3, got [2, 4]"),
    ({"moe_layers": [2, 1]}, "moe_layers: expected rising numbers from 0 to 3, got [2, 1]"),
    ({"layer_norm_eps": 1.0}, "layer_norm_eps: expected a number between 0 and 1, got 1"),
    ({"pad_token_id": 24}, "pad_token_id: 24 is no token of 24"),
    ({"head": "classifier"}, "num_labels: expected with head classifier or pretraining, got None with classifier"),
    ({"num_labels": 3}, "num_labels: expected with head classifier or pretraining, got 3 with none"),
    ({"moe_layers": []}, "num_experts: 4 experts, but moe_layers is empty"),
    ({"moe_layers": [], "num_experts": 0, "capacity_factor": 0.5}, "capacity_factor: 0.5, but moe_layers is empty"),
    ({"num_experts": 1}, "num_experts: expected at least 2 for the experts of moe_layers, got 1"),
    ({"capacity_factor": 0.0}, "capacity_factor: expected 0.01 to 4 (the experts), got 0"),
    ({"capacity_factor": 4.5}, "capacity_factor: expected 0.01 to 4 (the experts), got 4.5"),
    ({"capacity_factor": 0.125}, "capacity_factor: expected whole percents, got 0.125"),
    ({"capacities": [0, 50]}, "capacities: expected rising numbers from 1 to 100, as trained, got [0, 50]"),
    ({"capacities": [50, 150]}, "capacities: expected rising numbers from 1 to 100, as trained, got [50, 150]"),
    ({"group_sizes": [8192]}, "group_sizes: expected rising numbers from 1 to 4096, as trained, got [8192]"),
    ({"expert_counts": [2, 8]}, "expert_counts: expected rising numbers from 1 to 4, as trained, got [2, 8]"),
    (
        {"expert_counts": [2], "router": "tokens_choose"},
        "expert_counts: with tokens_choose a token whose expert is gone takes another: not this model",
    ),
    ({"moe_layers": [], "num_experts": 0, "capacities": [50]}, "capacities: the model has no experts"),
    ({"sequences": [8]}, "sequences: linear mixing serves 16 tokens alone"),
    (
        {"sequences": [32], "mixing": "toeplitz"},
        "sequences: expected rising numbers from 1 to 16, as trained, got [32]",
    ),
    (
        {"sequences": [8], "mixing": "toeplitz", "attention_layers": [0, 1, 2, 3]},
        "sequences: no layer mixes, so that every bucket up to 16 tokens is served as it is",
    ),
    (
        {"granularities": {"ffn": [1]}},
        "granularities: this model has no axis kind 'ffn'; expected one of "
        "moe.capacity_factor, moe.experts, moe.group_size",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message.split(":")[0] for _, message in REFUSED])
def test_what_makes_no_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: {re.escape(message)}$"):
        read(**changes)


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
