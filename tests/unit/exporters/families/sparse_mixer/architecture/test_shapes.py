from __future__ import annotations

from typing import Any, get_args

import pytest
from nestforge.elastic import PrefixSlice
from nestforge.exporters.families.sparse_mixer.config import MixingKind
from nestforge.exporters.families.sparse_mixer.ops import elastic_spec, parameter_shapes
from support.tiny_mixer import mixer_config, tiny_mixer

MIXINGS = get_args(MixingKind)
CONFIGS: dict[str, dict[str, Any]] = {
    **{mixing: {"mixing": mixing} for mixing in MIXINGS},
    "narrow embeddings": {"embedding_size": 8, "head": "masked_lm"},
    "classifier": {"head": "classifier", "num_labels": 3},
    "pretraining": {"head": "pretraining", "num_labels": 2},
    "experts as wide as the FFN": {"expert_intermediate_size": None, "router": "tokens_choose"},
    "BERT": {"attention_layers": (0, 1, 2, 3), "moe_layers": (), "num_experts": 0},
}


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS)
def test_shapes_are_those_of_the_module(overrides: dict[str, Any]) -> None:
    config = mixer_config(**overrides)
    module = {name: tuple(parameter.shape) for name, parameter in tiny_mixer(config).named_parameters()}
    assert parameter_shapes(config) == module


def test_experts_are_a_prefix_in_every_layer_that_has_them_and_the_router_follows() -> None:
    spec = elastic_spec(mixer_config())
    assert [(axis.name, axis.size, axis.choices) for axis in spec.axes] == [
        ("moe.capacity_factor", 100, (25, 50, 75, 100)),
        ("moe.group_size", 4096, (16, 4096)),
        ("moe.experts", 4, (1, 2, 3, 4)),
    ]
    parts = ("up_weight", "up_bias", "down_weight", "down_bias")
    assert spec.slices == tuple(
        PrefixSlice(f"layers.{layer}.moe.experts.{part}", 0, "moe.experts") for layer in (1, 2) for part in parts
    )
    assert spec.order_followers == tuple(
        PrefixSlice(f"layers.{layer}.moe.router.{part}", 0, "moe.experts")
        for layer in (1, 2)
        for part in ("weight", "bias")
    )
    assert [order.name for order in spec.orders] == ["layers.1.moe.experts", "layers.2.moe.experts"]
    assert (spec.depth, spec.trained_nested, spec.widths) == (4, False, frozenset())


def test_an_expert_has_its_weights_in_every_submodel() -> None:
    config = mixer_config()
    spec, shapes = elastic_spec(config), parameter_shapes(config)
    three = spec.submodel({"moe.experts": 3})
    cut = {name: spec.shape_of(name, shape, three) for name, shape in shapes.items()}
    changed = {name: cut[name] for name in shapes if cut[name] != shapes[name]}
    assert changed == {
        f"layers.{layer}.moe.experts.{part}": shape
        for layer in (1, 2)
        for part, shape in (
            ("up_weight", (3, 16, 24)),
            ("up_bias", (3, 24)),
            ("down_weight", (3, 24, 16)),
            ("down_bias", (3, 16)),
        )
    }


def test_levels_lower_the_capacity_alone() -> None:
    capacity = "moe.capacity_factor"
    assert elastic_spec(mixer_config()).granularities == {capacity: (0.25, 0.5, 0.75, 1.0)}
    assert elastic_spec(mixer_config(capacity_factor=0.5)).granularities == {capacity: (0.5, 1.0)}
    assert elastic_spec(mixer_config(capacities=(30, 90))).granularities == {capacity: (0.3, 0.9, 1.0)}
    stated = {"moe.experts": (0.5, 1.0)}
    assert elastic_spec(mixer_config(granularities=stated)).granularities == stated


def test_without_a_capacity_to_lower_the_model_itself_is_the_one_level() -> None:
    sequence = {"moe_layers": (), "num_experts": 0, "mixing": "hartley"}
    assert elastic_spec(mixer_config(**sequence)).granularities == {"sequence": (1.0,)}
    assert elastic_spec(mixer_config(capacities=(100,))).granularities == {"moe.group_size": (1.0,)}
    bare = elastic_spec(mixer_config(moe_layers=(), num_experts=0))
    assert (bare.axes, bare.granularities) == ((), None)
