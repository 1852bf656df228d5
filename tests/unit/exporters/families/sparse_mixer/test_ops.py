"""The paper's compute (Table 8), taken apart as its reference explains it, per example of 512 tokens."""

from collections.abc import Iterable
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.elastic import PrefixSlice
from nestforge.exporters.families.sparse_mixer.config import PRESETS, SPECTRAL
from nestforge.exporters.families.sparse_mixer.ops import (
    Variants,
    elastic_spec,
    forward_ops,
    head_ops,
    variant_ops,
)
from nestforge.workload import Op, macs
from support.tiny_mixer import mixer_config


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


# The training groups of 4096 tokens.
EIGHT = Bucket(8, 512)
HEADS = ("head.", "pooler", "classifier")


def gflops(ops: Iterable[Op], examples: int = 1) -> float:
    """FLOPs of the matrix products, two per multiply-add, in units of 1e9 per example."""
    return 2 * macs(ops) / examples / 1e9


def parts(name: str, bucket: Bucket) -> dict[str, float]:
    """GFLOPs per example by part, with gathers; the heads at 80 predicted positions, as in the paper's training."""
    config = PRESETS[name]
    universal = elastic_spec(config).universal()
    body = [op for op in forward_ops(config, universal, bucket) if not op.name.startswith(HEADS)]
    for ops in variant_ops(config, universal, bucket).values():
        body += next(iter(ops.values()))
    found = {
        part: gflops((op for op in body if f".{part}." in op.name), bucket.batch)
        for part in ("ffn", "experts", "mixing", "attention")
    }
    found["router"] = gflops((op for op in body if op.name.endswith(".router")), bucket.batch)
    found["projection"] = gflops((op for op in body if op.name == "embeddings.projection"), bucket.batch)
    assert sum(found.values()) == pytest.approx(gflops(body, bucket.batch))
    return {**found, "heads": gflops(head_ops(config, 1, 80))}


def one_hot(name: str, bucket: Bucket) -> float:
    config = PRESETS[name]
    variants = variant_ops(config, elastic_spec(config).universal(), bucket)
    return gflops([*variants["moe.dispatch"]["one_hot"], *variants["moe.combine"]["one_hot"]], bucket.batch)


def test_sparse_mixer_base_part_by_part() -> None:
    found = {part: round(value, 1) for part, value in parts("sparse-mixer-base", EIGHT).items()}
    assert found == {
        "ffn": 21.5,
        "experts": 8.6,
        "mixing": 5.4,
        "attention": 6.4,
        "router": 0.0,
        "projection": 0.3,
        "heads": 2.7,
    }


@pytest.mark.parametrize(
    ("name", "gathers", "with_one_hot"),
    [("sparse-mixer-base", 44.8, 62.0), ("fast-sparse-mixer-base", 40.5, 49.1)],
)
def test_totals(name: str, gathers: float, with_one_hot: float) -> None:
    total = sum(parts(name, EIGHT).values())
    assert round(total, 1) == gathers
    assert round(total + one_hot(name, EIGHT), 1) == with_one_hot


def test_bert_base() -> None:
    """102 in Table 8."""
    found = parts("bert-base", Bucket(1, 512))
    assert {part: round(value, 1) for part, value in found.items() if value} == {
        "ffn": 58.0,
        "attention": 38.7,
        "projection": 0.6,
        "heads": 4.0,
    }
    assert round(sum(found.values()), 1) == 101.3


def test_the_heads_of_an_engine_predict_every_position() -> None:
    config = PRESETS["sparse-mixer-base"]
    ops = forward_ops(config, elastic_spec(config).universal(), Bucket(1, 512))
    found = gflops(op for op in ops if op.name.startswith(HEADS))
    assert found == pytest.approx(2 * (512 * (512 * 512 + 512 * 32_000) + 512 * 512 + 512 * 2) / 1e9)


def test_capacity_changes_no_weight_and_work_outside_the_experts() -> None:
    config = mixer_config()
    spec = elastic_spec(config)
    whole, half = (
        forward_ops(config, submodel, Bucket(2, 16))
        for submodel in (spec.universal(), spec.submodel({"moe.capacity_factor": 50}))
    )
    assert [op.weight_bytes for op in whole] == [op.weight_bytes for op in half]
    changed = {op.name for op, less in zip(whole, half, strict=True) if less != op}
    assert changed == {f"layers.{n}.moe.experts.{part}" for n in (1, 2) for part in ("activation", "gates")}


@pytest.mark.parametrize("mixing", ["linear", "circulant", "toeplitz"])
def test_learned_mixing_is_two_products(mixing: str) -> None:
    config = mixer_config(mixing=mixing)
    ops = forward_ops(config, elastic_spec(config).universal(), Bucket(2, 16))
    found = [op for op in ops if ".mixing." in op.name]
    assert macs(found) == 2 * 2 * (16 * 16 * 16 + 16 * 16 * 16)  # layers, batch, hidden and sequence
    assert sum(op.weight_bytes for op in found) == 2 * 4 * (16 * 16 + 16 * 16)


BUCKET = Bucket(2, 16)
# Layers with experts, and layers that mix; tokens; hidden and sequence; slots of all experts together at 100 %.
LAYERS, T, D, SLOTS = 2, 32, 16, 32
DENSE: dict[str, Any] = {"moe_layers": (), "num_experts": 0}


def variants_of(values: dict[str, int] | None = None, **overrides: Any) -> Variants:
    config = mixer_config(**overrides)
    return variant_ops(config, elastic_spec(config).submodel(values or {}), BUCKET)


def test_what_there_is_to_choose() -> None:
    assert {computed: list(variants) for computed, variants in variants_of().items()} == {
        "moe.dispatch": ["gather", "one_hot"],
        "moe.products": ["batched", "per_expert"],
        "moe.combine": ["gather", "scatter", "one_hot"],
    }
    spectral = variants_of(mixing="fourier", **DENSE)
    assert {computed: list(variants) for computed, variants in spectral.items()} == {"mixing": ["dense", "folded"]}
    assert variants_of(mixing="circulant", **DENSE) == {}
    assert variants_of(mixing="fourier", attention_layers=(0, 1, 2, 3), **DENSE) == {}


def test_gathers_multiply_nothing_and_one_hot_products_every_token() -> None:
    variants = variants_of()
    for computed in ("moe.dispatch", "moe.combine"):
        assert macs(variants[computed]["gather"]) == 0
        assert macs(variants[computed]["one_hot"]) == LAYERS * SLOTS * T * D
    assert macs(variants["moe.combine"]["scatter"]) == 0


def test_both_products_are_the_same_work_on_the_same_weights() -> None:
    products = variants_of()["moe.products"]
    assert {macs(ops) for ops in products.values()} == {LAYERS * SLOTS * 2 * D * 24}
    weights = LAYERS * 4 * 4 * ((D + 1) * 24 + (24 + 1) * D)  # float32, experts
    assert {sum(op.weight_bytes for op in ops) for ops in products.values()} == {weights}


def test_fewer_experts_compute_less_and_keep_their_slots() -> None:
    for variant in ("batched", "per_expert"):
        work = {n: macs(variants_of({"moe.experts": n})["moe.products"][variant]) for n in (1, 2, 4)}
        assert (work[4], work[2]) == (4 * work[1], 2 * work[1])


def test_half_the_capacity_is_half_of_everything_but_what_tokens_ask() -> None:
    whole, half = variants_of(), variants_of({"moe.capacity_factor": 50})
    for computed, variant in (("moe.dispatch", "one_hot"), ("moe.products", "batched"), ("moe.combine", "one_hot")):
        assert macs(whole[computed][variant]) == 2 * macs(half[computed][variant])


def test_a_token_that_chooses_is_fetched_from_one_expert() -> None:
    for router, asked in (("experts_choose", 4), ("tokens_choose", 1)):
        ops = variants_of(router=router)["moe.combine"]["gather"]
        assert sum(op.activation_bytes for op in ops if op.kind == "gather") == 4 * LAYERS * asked * T * D


@pytest.mark.parametrize("mixing", SPECTRAL)
def test_dense_spectral_mixing(mixing: str) -> None:
    pairs = 1 if "separable" in mixing else 2
    dense = variants_of(mixing=mixing, **DENSE)["mixing"]["dense"]
    assert macs(dense) == LAYERS * pairs * (T * D * D + 2 * 16 * 16 * D)


@pytest.mark.parametrize(("mixing", "sequence"), [(mixing, 1 if mixing == "fourier" else 2) for mixing in SPECTRAL])
def test_folding_halves_both_sides_of_every_product(mixing: str, sequence: int) -> None:
    """Along the hidden axis two products of half by half; along the sequence so many for each half of the columns."""
    even, odd = 9, 7  # indices 0..8 and 1..7 of 16
    hidden = T * (even**2 + odd**2)
    fourier = 2 * (even * even**2 + odd * odd**2)  # cosines of the even columns, sines of the odd ones
    along = fourier if sequence == 1 else 2 * (even + odd) * (even**2 + odd**2)
    assert macs(variants_of(mixing=mixing, **DENSE)["mixing"]["folded"]) == LAYERS * (hidden + along)
