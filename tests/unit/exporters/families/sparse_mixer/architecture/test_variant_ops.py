from __future__ import annotations

from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.exporters.families.sparse_mixer.config import SPECTRAL
from nestforge.exporters.families.sparse_mixer.ops import Variants, elastic_spec, variant_ops
from nestforge.workload import macs
from support.tiny_mixer import mixer_config

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


def test_smaller_groups_have_cheaper_one_hot_products() -> None:
    whole, two = variants_of(), variants_of({"moe.group_size": 16})
    assert macs(whole["moe.combine"]["one_hot"]) == 2 * macs(two["moe.combine"]["one_hot"])
    assert macs(whole["moe.products"]["batched"]) == macs(two["moe.products"]["batched"])


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


def test_folding_pays_at_the_size_of_the_paper() -> None:
    config = mixer_config(mixing="hartley", hidden_size=768, max_position_embeddings=512, **DENSE)
    variants = variant_ops(config, elastic_spec(config).universal(), Bucket(1, 512))["mixing"]
    assert macs(variants["dense"]) / macs(variants["folded"]) == pytest.approx(4, abs=0.01)
