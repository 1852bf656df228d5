"""Tests."""

import json
import re
from itertools import pairwise
from math import prod
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.errors import CheckpointError, PlanError
from nestforge.exporters.checkpoints.own_folder import config_from_json
from nestforge.exporters.families.sparse_mixer.config import (
    CAPACITY,
    EXPERTS,
    GROUP,
    PRESETS,
    Routing,
    SparseMixerConfig,
    capacity,
    placed,
    routing,
    token_groups,
)
from nestforge.exporters.families.sparse_mixer.ops import elastic_spec, parameter_shapes
from nestforge.tools.cli import main
from support.tiny_mixer import TINY_MIXER, mixer_config

STATED = {"model_type": "sparse_mixer", **json.loads(json.dumps(TINY_MIXER))}


def read(**changes: Any) -> SparseMixerConfig:
    data = {key: value for key, value in {**STATED, **changes}.items() if value is not ...}
    return config_from_json(SparseMixerConfig, data, "config.json")


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_reads_back(name: str) -> None:
    assert config_from_json(SparseMixerConfig, json.loads(json.dumps(PRESETS[name].to_json())), "here") == PRESETS[name]


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
    ({"capacities": [0, 50]}, "capacities: expected rising numbers from 1 to 100, got [0, 50]"),
    ({"capacities": []}, "capacities: expected at least one number"),
    ({"capacities": [50, 150]}, "capacities: expected rising numbers from 1 to 100, got [50, 150]"),
    ({"group_sizes": [8192]}, "group_sizes: expected rising numbers from 1 to 4096, got [8192]"),
    ({"expert_counts": [2, 8]}, "expert_counts: expected rising numbers from 1 to 4, got [2, 8]"),
    (
        {"expert_counts": [2], "router": "tokens_choose"},
        "expert_counts: with tokens_choose a token whose expert is gone takes another: not this model",
    ),
    ({"moe_layers": [], "num_experts": 0, "capacities": [50]}, "capacities: the model has no experts"),
    ({"sequences": [8]}, "sequences: linear mixing serves 16 tokens alone"),
    (
        {"sequences": [32], "mixing": "toeplitz"},
        "sequences: expected rising numbers from 1 to 16, got [32]",
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
    ("config", "percents", "tokens", "slots"),
    [
        (BASE, (100, 75, 50), 4096, (256, 192, 128)),  # as the reference has them
        (BASE, (100, 75, 50), 512, (32, 24, 16)),
        (BASE, (100, 75, 50), 128, (8, 6, 4)),
        (BASE, (100,), 40, (4,)),  # the floor
        (BASE, (100,), 3, (3,)),  # never more than the group has tokens
        (mixer_config(num_experts=2, capacity_factor=2.0), (200,), 8, (8,)),
        *((mixer_config(num_experts=16, min_capacity=0), (100,), n, (k,)) for n, k in ((40, 2), (56, 4), (24, 2))),
        *((mixer_config(capacity_rounding=r), (100,), 10, (k,)) for r, k in (("floor", 2), ("ceil", 3))),
    ],
)
def test_slots(config: SparseMixerConfig, percents: tuple[int, ...], tokens: int, slots: tuple[int, ...]) -> None:
    assert tuple(capacity(config, percent, tokens) for percent in percents) == slots


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


COMMANDS = ("inspect", "plan")


def count(name: str, pattern: str = ".*") -> int:
    return sum(prod(shape) for key, shape in parameter_shapes(PRESETS[name]).items() if re.fullmatch(pattern, key))


@pytest.mark.parametrize(
    ("name", "exact", "published"),
    [
        ("bert-base", 111_835_138, 112),
        ("sparse-mixer-base", 182_356_802, 180),
        ("fast-sparse-mixer-base", 182_356_802, 180),
        ("sparse-mixer-base-ff2056", 182_963_602, 180),
        ("fast-sparse-mixer-base-ff2056", 182_963_602, 180),
    ],
)
def test_parameters_round_to_those_published(name: str, exact: int, published: int) -> None:
    """Table 8 in millions, Sparse Mixers to two digits."""
    d = PRESETS[name].hidden_size
    neurons = PRESETS[name].intermediate_size
    square, ffn = d * d + d, 2 * d * neurons + neurons + d
    outside = (32_000 + 512 + 4 + 2) * d + square  # tables, their norm, projection
    heads = square + (square + 2 * d + 32_000) + 2 * d + 2  # pooler, tokens, labels
    if name == "bert-base":
        layers = 12 * (4 * square + ffn + 4 * d)
    else:
        layers = 10 * (512**2 + d * d) + 4 * 4 * square + 10 * ffn + 4 * (16 * ffn + 16 * d + 16) + 14 * 4 * d
    assert count(name) == outside + layers + heads == exact
    assert round(exact / 1e6, 0 if published == 112 else -1) == published


def test_layers_of_the_chosen_models() -> None:
    base, small = PRESETS["sparse-mixer-base"], PRESETS["sparse-mixer-small"]
    assert (base.attention_layers, base.moe_layers) == ((10, 11, 12, 13), (5, 6, 7, 8))
    assert (small.attention_layers, small.moe_layers) == ((4, 5, 6, 7), (2, 3, 4, 5)), "4 and 5 attend and route"
    for name, model in PRESETS.items():
        assert model.problem() is None, name
        assert model.head_dim == 64
        assert model.intermediate_size == (2056 if name.endswith("-ff2056") else 4 * model.hidden_size), name
    assert PRESETS["bert-base"].attention_layers == tuple(range(12))
    assert [PRESETS[f"{speed}sparse-mixer-base"].capacity_factor for speed in ("", "fast-")] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("layout", "number", "layers", "chosen"),
    [
        ("top", 4, 14, (10, 11, 12, 13)),
        ("bottom", 6, 12, (0, 1, 2, 3, 4, 5)),
        ("middle", 4, 14, (5, 6, 7, 8)),
        ("middle", 6, 12, (3, 4, 5, 6, 7, 8)),
        ("mixed", 6, 12, (0, 2, 4, 6, 8, 10)),
        ("mixed", 4, 12, (0, 3, 6, 9)),
        ("mixed", 12, 12, tuple(range(12))),
        ("mixed-odd", 6, 12, (1, 3, 5, 7, 9, 11)),
        ("mixed", 4, 14, (0, 3, 6, 9, 12)),  # 14 // 4: five, as in the reference code
        ("mixed", 0, 12, ()),
        ("top", 0, 12, ()),
    ],
)
def test_layouts(layout: str, number: int, layers: int, chosen: tuple[int, ...]) -> None:
    assert placed(layout, number, layers) == chosen


def test_more_layers_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"^count: expected 0 to 4, got 5$"):
        placed("top", 5, 4)


def test_the_models_of_the_tables_are_all_there() -> None:
    tables = {
        1: ["fourier-mixer", "hartley-mixer", "circulant-mixer", "toeplitz-mixer", "linear-mixer"],
        2: [f"{kind}-mixer-{k}" for kind in ("hartley", "linear") for k in (1, 2, 3, 4, 6)],
        3: ["linear-mixer-4-d512", "linear-mixer-4-d256", "linear-mixer-4-d128"],
        4: ["linear-mixer-4-moe6-mixed-tokens-choose", "linear-mixer-4-moe6-mixed"],
        5: [
            f"linear-mixer-4-moe{layout}"
            for layout in ("2-mixed", "4-mixed", "12-mixed", "6-bottom", "6-middle", "6-mixed-odd", "6-top")
        ],
        9: ["sparse-mixer-base-g2048", "sparse-mixer-base-cf75-g2048"],
    }
    chosen = ["sparse-mixer-base", "fast-sparse-mixer-base", "sparse-mixer-small", "bert-base"]
    chosen += ["sparse-mixer-base-ff2056", "fast-sparse-mixer-base-ff2056"]
    assert sorted([*chosen, *(name for names in tables.values() for name in names)]) == sorted(PRESETS)
    routed = PRESETS["linear-mixer-4-moe6-mixed-tokens-choose"]
    assert (routed.router, routed.batch_prioritized, routed.moe_layers) == ("tokens_choose", True, (0, 2, 4, 6, 8, 10))
    assert {PRESETS[name].num_hidden_layers for table in range(1, 6) for name in tables[table]} == {12}
    assert [PRESETS[name].hidden_size for name in tables[3]] == [512, 256, 128]


def test_inspect_takes_a_preset() -> None:
    options = ["--profile", "raspberry-pi-5", "--bucket", "1x512", "--json"]
    found = CliRunner().invoke(main, ["inspect", "preset:sparse-mixer-base", *options])
    assert found.exit_code == 0, found.stderr
    view = json.loads(found.stdout)
    assert (view["family"], [axis["name"] for axis in view["axes"]]) == (
        "sparse_mixer",
        ["moe.capacity_factor", "moe.group_size", "moe.experts"],
    )
    assert [level["submodel"] for level in view["levels"]] == [
        f"moe.capacity_factor{percent}-moe.group_size4096-moe.experts16" for percent in (25, 50, 75, 100)
    ]
    assert {level["parameters"] for level in view["levels"]} == {182_356_802}, "capacity has no weights"
    macs = [level["macs"]["b1-s512"] for level in view["levels"]]
    quarter = 2 * 512 // 4 * 512 * 2048 * 4  # up and down, a quarter of the tokens, d, f, layers
    assert [high - low for low, high in pairwise(macs)] == [quarter] * 3


def test_inspect_and_plan_count_the_same_engines() -> None:
    """In the variants that the profile gets; FFNs that never shrink have no column of their own."""
    options = ["preset:sparse-mixer-base", "--profile", "laptop-x86", "--bucket", "1x512"]
    seen, planned = (json.loads(CliRunner().invoke(main, [name, *options, "--json"]).stdout) for name in COMMANDS)
    assert {level["submodel"]: level["flops"]["b1-s512"] for level in seen["levels"]} == {
        candidate["id"]: candidate["costs"][0]["flops"] for candidate in planned["candidates"]
    }
    assert seen["variants"] == planned["variants"]
    assert {view["variants"]["moe.products"] for view in seen["variants"]} == {"per_expert"}
    for name in COMMANDS:
        text = CliRunner().invoke(main, [name, *options]).stdout
        assert re.search(r"^variant of moe\.products +per_expert$", text, re.MULTILINE)
        assert re.search(r"^submodel +M params +M non-emb\. +(weights|memory) MB +GFLOPs", text, re.MULTILINE)
