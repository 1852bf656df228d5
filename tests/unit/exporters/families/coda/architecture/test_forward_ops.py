"""What a pass costs: the multiply-adds of the reference's table for T5 v1.1 (512 tokens, adapters of 64)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nestforge.bucket import Bucket
from nestforge.exporters.families.coda.config import CodaConfig
from nestforge.exporters.families.coda.family import PRESETS
from nestforge.exporters.families.coda.ops import elastic_spec, forward_ops, variant_ops
from nestforge.workload import macs
from support.tiny_coda import OF_IMAGES, coda_config

BUCKET = Bucket(1, 512)
PARALLEL = ("parallel", "sequential")


def layer_macs(config: CodaConfig, reduction: int) -> int:
    """Of the layers, in the variants that read and write by index."""
    submodel = elastic_spec(config).submodel({"coda.reduction": reduction})
    moved = [op for options in variant_ops(config, submodel, BUCKET).values() for op in next(iter(options.values()))]
    return macs([*forward_ops(config, submodel, BUCKET), *moved])


@pytest.mark.parametrize("size", ["base", "xl"])
@pytest.mark.parametrize(("kind", "key"), [("k-to-k", 0), ("k-to-all", 1), ("k-to-all-mq", 2)])
def test_ratios_are_those_of_the_cost_model(size: str, kind: str, key: int) -> None:
    """Dense over conditional, without the adapter, which the table's dense model has not."""
    expected = {
        ("base", 3): (3.1, 2.2, 2.8),
        ("base", 5): (5.1, 3.0, 4.4),
        ("xl", 3): (3.0, 2.2, 2.9),
        ("xl", 5): (5.0, 2.9, 4.7),
    }
    config = replace(PRESETS[f"coda-t5-{size}-{kind}"], reduction_of_one="dense")
    adapters = 2 * 512 * config.hidden_size * config.adapter_size * config.num_hidden_layers
    dense = layer_macs(config, 1) - adapters
    for reduction in (3, 5):
        assert dense / layer_macs(config, reduction) == pytest.approx(expected[size, reduction][key], abs=0.13)


def test_the_router_is_counted_round_by_round() -> None:
    config = PRESETS["coda-t5-base-k-to-k"]
    names = [op.name for op in forward_ops(config, elastic_spec(config).universal(), BUCKET)]
    assert sum(name.startswith("layers.0.router.") for name in names) == 5 + 20 * 4
    dense = replace(config, reduction_of_one="dense")
    assert not any(".router." in op.name for op in forward_ops(dense, elastic_spec(dense).universal(), BUCKET))


def test_a_dense_layer_computes_every_token() -> None:
    config = replace(PRESETS["coda-t5-base-k-to-k"], conditional_layers=(1,))
    submodel = elastic_spec(config).submodel({"coda.reduction": 8})
    ops = {op.name: op.flops for op in forward_ops(config, submodel, BUCKET)}
    assert ops["layers.0.ffn.up"] == 8 * ops["layers.1.ffn.up"]


def test_biases_of_pairs_are_made_where_they_are_read() -> None:
    """K-to-k: by each layer for its own tokens. A table of all pairs is for layers that read all keys."""
    made = {}
    for kind, dense in (("k-to-k", ()), ("k-to-all", ()), ("k-to-k", (0,))):
        whole = PRESETS[f"coda-t5-base-{kind}"]
        config = replace(whole, conditional_layers=tuple(n for n in range(12) if n not in dense))
        submodel = elastic_spec(config).submodel({"coda.reduction": 4})
        ops = {op.name: op.activation_bytes for op in forward_ops(config, submodel, BUCKET)}
        made[kind, dense] = [ops.get(name, 0) // (12 * 4) for name in ("relative_bias", "layers.1.bias")]
        assert ("layers.0.bias" in ops) == (not dense)
    assert made == {
        ("k-to-k", ()): [0, 128 * 128],
        ("k-to-all", ()): [512 * 512, 128 * 512],
        ("k-to-k", (0,)): [512 * 512, 128 * 128],
    }


def test_of_images_patches_and_their_tokens_are_counted() -> None:
    """2 images of six patches behind one token, at r = 4 two of the seven tokens."""
    config = coda_config(**OF_IMAGES, reductions=(4, 1))
    submodel = elastic_spec(config).submodel({"coda.reduction": 4})
    ops = {op.name: macs([op]) for op in forward_ops(config, submodel, Bucket(2, 1))}
    assert ops["embeddings.patch"] == 2 * 6 * (2 * 4 * 4) * 32
    assert ops["layers.0.adapter.down"] == 2 * 7 * 32 * 8
    assert ops["layers.0.ffn.up"] == 2 * 2 * 32 * 48


def test_low_rank_terms_are_of_what_attention_reads() -> None:
    """At r = 4 two of eight tokens ask, and k-to-all makes values of all; of the adapter's FFN nothing is left."""
    config = coda_config(adapter="lora", num_key_value_heads=2)
    submodel = elastic_spec(config).submodel({"coda.reduction": 4})
    ops = {op.name: macs([op]) for op in forward_ops(config, submodel, Bucket(2, 8))}
    found = {name.removeprefix("layers.0.attention."): ops[name] for name in ops if name.startswith("layers.0")}
    assert not any(".adapter." in name for name in ops)
    assert found["query.low_rank.down"] == found["query.low_rank.up"] == 2 * 2 * 32 * 8
    assert (found["value.low_rank.down"], found["value.low_rank.up"]) == (2 * 8 * 32 * 8, 2 * 8 * 8 * 16)
    parallel, sequential = (forward_ops(coda_config(adapter=kind), submodel, Bucket(2, 8)) for kind in PARALLEL)
    assert parallel == sequential


def test_layers_that_select_other_numbers_cost_other_numbers() -> None:
    config = coda_config(tokens_selected={"8": {"4": (6, 1)}})
    submodel = elastic_spec(config).submodel({"coda.reduction": 4})
    ops = {op.name: macs([op]) for op in forward_ops(config, submodel, Bucket(2, 8))}
    assert ops["layers.0.ffn.up"] == 6 * ops["layers.1.ffn.up"]
    offered = variant_ops(config, submodel, Bucket(2, 8))["coda.combine"]["one_hot"]
    assert macs(offered) == 2 * 8 * 32 * (6 + 1)
