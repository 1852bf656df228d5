from __future__ import annotations

from typing import Any

import pytest
import torch
from nestforge.compiler.planning.levels import levels
from nestforge.elastic import Axis
from nestforge.exporters.families.coda.model import CodaEncoder
from nestforge.exporters.families.coda.ops import (
    elastic_spec,
    is_of_task,
    parameter_group,
    parameter_shapes,
)
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
    assert parameter_shapes(config) == {name: tuple(value.shape) for name, value in model.named_parameters()}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_parameter_that_has_neurons_is_sliced(settings: dict[str, Any]) -> None:
    config = coda_config(**settings)
    spec, shapes = elastic_spec(config), parameter_shapes(config)
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
    shapes = parameter_shapes(coda_config(adapter=adapter, num_hidden_layers=1))
    own = {name.removeprefix("layers.0.") for name in shapes if is_of_task(name)}
    ffn = {f"adapter.{part}.{kind}" for part in ("down", "up") for kind in ("weight", "bias")}
    terms = {f"adapter.{matrix}.{part}.weight" for matrix in ("query", "value") for part in ("down", "up")}
    trained = terms if adapter == "lora" else ffn
    assert own == {*trained, "router.weight", "attention_norm.weight", "ffn_norm.weight", "norm.weight"}


def test_inspect_counts_what_a_task_trains() -> None:
    groups: dict[str | None, int] = {}
    for name, shape in parameter_shapes(coda_config()).items():
        groups[parameter_group(name)] = groups.get(parameter_group(name), 0) + torch.Size(shape).numel()
    assert groups["routers"] == 2 * 32
    assert groups["norms"] == 5 * 32
    assert groups["adapters"] == 2 * (2 * 32 * 8 + 32 + 8)
