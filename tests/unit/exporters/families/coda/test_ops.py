"""Costs of a pass: the multiply-adds of the reference's table for T5 v1.1 (512 tokens, adapters of 64)."""

from dataclasses import replace
from math import ceil
from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.planning.levels import levels
from nestforge.elastic import Axis
from nestforge.errors import PlanError
from nestforge.exporters.families.coda.config import CodaConfig
from nestforge.exporters.families.coda.family import PRESETS
from nestforge.exporters.families.coda.model import CodaEncoder
from nestforge.exporters.families.coda.ops import (
    elastic_spec,
    forward_ops,
    is_of_task,
    layer_tokens,
    parameters,
    reduction_of,
    selected_counts,
    variant_ops,
)
from nestforge.workload import macs
from support.tiny_coda import OF_IMAGES, coda_config

SETTINGS: list[dict[str, Any]] = [
    {},
    {"router": "first_k", "position": "learned"},
    {"conditional_layers": (1,), "gated_ffn": True, "bias": True, "norm": "layer"},
    {"norm_place": "after", "norm": "layer", "type_vocab_size": 2, "position": "learned"},
    {**OF_IMAGES, "position": "learned", "adapter": "sequential"},
    {"adapter": "lora", "num_key_value_heads": 2},
    {"num_key_value_heads": 2, "head_dim": 6, "adapter_bias": False, "num_labels": 3, "position": "rotary"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_they_are_the_parameters_of_the_model(settings: dict[str, Any]) -> None:
    config = coda_config(**settings)
    with torch.device("meta"):
        model = CodaEncoder(config)
    assert parameters(config).shapes == {name: tuple(value.shape) for name, value in model.named_parameters()}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_parameter_that_has_neurons_is_sliced(settings: dict[str, Any]) -> None:
    config = coda_config(**settings)
    spec, shapes = elastic_spec(config), parameters(config).shapes
    assert {cut.parameter for cut in spec.slices} == {name for name, shape in shapes.items() if 48 in shape}
    assert all(shapes[cut.parameter][cut.dim] == 48 for cut in spec.slices)


def test_reduction_is_an_axis_of_the_whole_model() -> None:
    spec = elastic_spec(coda_config())
    assert spec.axes == (Axis("layers.0.ffn", 48), Axis("layers.1.ffn", 48), Axis("coda.reduction", 1, (4, 1)))
    assert spec.universal().id == "ffn48-coda.reduction1"
    assert elastic_spec(coda_config(reduction=2, reductions=(2,))).kinds == ["ffn"], "one choice is none"


@pytest.mark.parametrize("nesting", [{}, {"nested": True}, {"granularities": {"ffn": (0.5, 1.0)}}], ids=str)
def test_there_is_a_level_for_each_reduction(nesting: dict[str, Any]) -> None:
    """Also where training sampled widths, which need not be as many."""
    spec = elastic_spec(coda_config(reduction=4, reductions=(4, 2, 1), **nesting))
    assert [level.submodel.id for level in levels(spec, None, 8)] == [f"ffn48-coda.reduction{r}" for r in (4, 2, 1)]
    narrow = levels(spec, {"ffn": (0.5, 1.0)}, 8)
    assert [level.submodel.id for level in narrow] == ["ffn24-coda.reduction1", "ffn48-coda.reduction1"]


def test_levels_are_those_stated_of_both_and_of_widths_where_one_reduction_is_offered() -> None:
    both = {"ffn": (0.5, 1.0), "coda.reduction": (0.25, 1.0)}
    found = levels(elastic_spec(coda_config(granularities=both)), None, 8)
    assert [level.submodel.id for level in found] == ["ffn24-coda.reduction4", "ffn48-coda.reduction1"]
    alone = elastic_spec(coda_config(reduction=2, reductions=(2,), granularities={"ffn": (0.5, 1.0)}))
    assert [level.submodel.id for level in levels(alone, None, 8)] == ["ffn24", "ffn48"]


@pytest.mark.parametrize("adapter", ["parallel", "sequential", "lora"])
def test_a_task_has_what_every_kind_of_adapter_trains(adapter: str) -> None:
    shapes = parameters(coda_config(adapter=adapter, num_hidden_layers=1)).shapes
    own = {name.removeprefix("layers.0.") for name in shapes if is_of_task(name)}
    ffn = {f"adapter.{part}.{kind}" for part in ("down", "up") for kind in ("weight", "bias")}
    terms = {f"adapter.{matrix}.{part}.weight" for matrix in ("query", "value") for part in ("down", "up")}
    trained = terms if adapter == "lora" else ffn
    assert own == {*trained, "router.weight", "attention_norm.weight", "ffn_norm.weight", "norm.weight"}


def test_k_is_a_whole_number_of_tokens() -> None:
    config = coda_config(max_position_embeddings=512)
    assert [layer_tokens(config, 512, r)[0] for r in (1, 2, 3, 5, 8, 512)] == [512, 256, 171, 103, 64, 1]
    for n in range(1, 64):
        assert all(layer_tokens(config, n, r) == dict.fromkeys((0, 1), ceil(n / r)) for r in range(1, n + 1))


def test_a_submodel_has_its_own_k_in_each_bucket() -> None:
    config = coda_config()
    spec = elastic_spec(config)
    quarter = spec.submodel({"coda.reduction": 4})
    assert (reduction_of(config, quarter), reduction_of(config, spec.universal())) == (4, 1)
    assert [selected_counts(config, quarter, Bucket(2, n))[1] for n in (4, 8, 10)] == [1, 2, 3]
    assert selected_counts(config, spec.universal(), Bucket(2, 8)) == {0: 8, 1: 8}
    assert selected_counts(coda_config(reduction_of_one="dense"), spec.universal(), Bucket(2, 8)) == {}
    problem = r"^bucket b2-s3: coda\.reduction 4: expected 1 to 3, the tokens of a row; ask for a longer bucket, or"
    with pytest.raises(PlanError, match=problem):
        selected_counts(config, quarter, Bucket(2, 3))


def test_where_the_checkpoint_states_k_it_is_that() -> None:
    config = coda_config(tokens_selected={"8": {"4": 3}, "10": {"4": (5, 1)}})
    quarter = elastic_spec(config).submodel({"coda.reduction": 4})
    assert selected_counts(config, quarter, Bucket(2, 8)) == {0: 3, 1: 3}
    assert selected_counts(config, quarter, Bucket(2, 10)) == {0: 5, 1: 1}
    assert selected_counts(config, quarter, Bucket(2, 9)) == {0: 3, 1: 3}, "ceil(9 / 4), where nothing is stated"


BUCKET = Bucket(1, 512)
PARALLEL = ("parallel", "sequential")


def layer_macs(config: CodaConfig, reduction: int) -> int:
    """For the layers, in the variants that read and write by index."""
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


def test_products_grow_with_the_tokens_and_indices_do_not() -> None:
    config = coda_config()
    quarter = elastic_spec(config).submodel({"coda.reduction": 4})
    offered = variant_ops(config, quarter, Bucket(2, 8))
    assert {computed: list(options) for computed, options in offered.items()} == {
        "coda.dispatch": ["gather", "one_hot"],
        "coda.combine": ["scatter", "one_hot"],
    }
    # k = 2 of 8 tokens, 2 rows, width 32, 2 layers; the raw residual is read beside the normed rows.
    assert macs(offered["coda.dispatch"]["one_hot"]) == 2 * 2 * (2 * 2 * 8 * 32)
    assert macs(offered["coda.combine"]["one_hot"]) == 2 * (2 * 2 * 8 * 32)
    assert macs(offered["coda.dispatch"]["gather"]) == macs(offered["coda.combine"]["scatter"]) == 0
    normed = variant_ops(coda_config(ffn_residual="normed"), quarter, Bucket(2, 8))
    assert len(normed["coda.dispatch"]["gather"]) == 2


def test_where_all_tokens_pass_nothing_is_moved() -> None:
    config = coda_config(reduction_of_one="dense")
    assert variant_ops(config, elastic_spec(config).universal(), Bucket(2, 8)) == {}
