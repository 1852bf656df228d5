from __future__ import annotations

import json
import re
from typing import Any

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.own_folder import config_from_json
from nestforge.exporters.families.matformer.config import (
    LANGUAGE,
    VISION,
    MatformerConfig,
    MatformerVitConfig,
)
from support.tiny_matlm import TINY_MATLM, matlm_config

STATED = {"model_type": "matformer_lm", **TINY_MATLM}


def read(**changes: Any) -> MatformerConfig:
    data = {key: value for key, value in {**STATED, **changes}.items() if value is not ...}
    return config_from_json(MatformerConfig, data, "config.json")


@pytest.mark.parametrize("name", [*LANGUAGE, *VISION])
def test_what_is_written_reads_back(name: str) -> None:
    config = {**LANGUAGE, **VISION}[name]
    assert config_from_json(type(config), json.loads(json.dumps(config.to_json())), "here") == config


def test_widths_are_one_for_all_layers_or_one_a_layer() -> None:
    assert read().widths == (64, 64, 64)
    assert read(intermediate_size=[16, 32, 64]).widths == (16, 32, 64)
    assert read().head_dim == 8


def test_levels_are_those_stated_else_those_of_the_paper() -> None:
    assert read().levels == {"ffn": (0.125, 0.25, 0.5, 1.0)}
    assert read(nested_heads=True).levels == {"ffn": (0.125, 0.25, 0.5, 1.0), "heads": (0.25, 0.5, 0.75, 1.0)}
    assert read(granularities={"ffn": [0.5, 1]}).levels == {"ffn": (0.5, 1.0)}
    assert read(nested=False).levels is None


def test_positions_biases_and_norm_weights_are_those_stated_else_the_old_ones() -> None:
    assert (read().position, read().bias, read().norm_weights) == ("rotary", False, False)
    odd = read(hidden_size=12, position="relative_bias", bias=True, norm_weights=True)
    assert (odd.position, odd.bias, odd.norm_weights, odd.head_dim) == ("relative_bias", True, True, 3)


def test_what_other_tools_write_beside_is_no_mistake() -> None:
    assert read(architectures=["MatformerLM"], _name_or_path="somewhere") == matlm_config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_sizes": 3}, "config.json: unknown key 'hidden_sizes'; did you mean 'hidden_size'?"),
        ({"vocab_size": ...}, "config.json: missing key 'vocab_size'"),
        ({"vocab_size": 0}, "config.json: vocab_size: expected at least 1, got 0"),
        ({"activation": "relu"}, "config.json: activation: got 'relu'; did you mean 'gelu'?"),
        ({"intermediate_size": [16, 32]}, "config.json: intermediate_size: expected 3 widths, one per layer, got 2"),
        ({"intermediate_size": [16, 0, 64]}, "config.json: intermediate_size[1]: expected at least 1, got 0"),
        ({"hidden_size": 30}, "config.json: hidden_size: 30 is no multiple of num_attention_heads 4"),
        ({"hidden_size": 12}, "config.json: num_attention_heads: rotary positions need heads of even size, got 3"),
        ({"position": "absolute"}, "config.json: position: got 'absolute'; expected one of relative_bias, rotary"),
        ({"bias": 1}, "config.json: bias: expected true or false, got int 1"),
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers: expected at most 1024, got 1000000000"),
        ({"nested": "yes"}, "config.json: nested: expected true or false, got str 'yes'"),
        (
            {"granularities": {"heads": [1]}},
            "config.json: granularities: this model has no axis kind 'heads'; expected one of ffn",
        ),
        (
            {"granularities": {"ffn": [0.5, 0.25, 1]}},
            "config.json: granularities: ffn: expected fractions that increase from above 0 to 1, got [0.5, 0.25, 1]",
        ),
        (
            {"granularities": {"ffn": [0.5]}},
            "config.json: granularities: ffn: expected fractions that increase from above 0 to 1, got [0.5]",
        ),
        (
            {"granularities": {"ffn": [0.5, 1], "heads": [1]}, "nested_heads": True},
            "config.json: granularities: expected equally many fractions for every axis kind, and at least one kind",
        ),
        (
            {"granularities": {}},
            "config.json: granularities: expected equally many fractions for every axis kind, and at least one kind",
        ),
    ],
)
def test_what_makes_no_model_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        read(**changes)


def test_an_image_is_cut_into_whole_patches() -> None:
    data = {**VISION["matvit-b16"].to_json(), "image_size": 225}
    with pytest.raises(CheckpointError, match="image_size: 225 is no multiple of patch_size 16"):
        config_from_json(MatformerVitConfig, data, "here")
