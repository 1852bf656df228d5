from __future__ import annotations

import json
import re
from typing import Any

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.own_folder import config_from_json
from nestforge.exporters.families.mhe.config import (
    PRESETS,
    MheDecoderConfig,
    MheEncoderConfig,
    MheEncoderDecoderConfig,
)
from support.tiny_mhe import TINY_MHE

ENCODER: dict[str, Any] = {**TINY_MHE, "factors": "e", "model_type": "mhe_encoder"}


def read(**changes: Any) -> MheEncoderConfig:
    data = {key: value for key, value in {**ENCODER, **changes}.items() if value is not ...}
    return config_from_json(MheEncoderConfig, data, "config.json")


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_reads_back(name: str) -> None:
    config = PRESETS[name]
    assert config_from_json(type(config), json.loads(json.dumps(config.to_json())), "here") == config


def test_what_follows_from_others() -> None:
    config = read()
    assert (config.head_size, config.inner, config.scale) == (8, 32, 8**-0.5)
    other = read(head_dim=16, softmax_scale=0.5)
    assert (other.head_size, other.inner, other.scale) == (16, 64, 0.5)


@pytest.mark.parametrize(
    ("attention", "kinds"),
    [
        ("mha", ("ffn", "heads")),
        ("sha", ("ffn",)),
        ("mqa", ("ffn", "heads")),
        ("skv", ("ffn", "heads")),
        ("el_att", ("ffn",)),
        ("mhe_add", ("ffn", "heads")),
    ],
)
def test_where_a_head_can_be_left_out(attention: str, kinds: tuple[str, ...]) -> None:
    assert read(attention=attention, factors=...).kinds == kinds
    assert read(attention=attention, factors=..., elastic_heads=False).kinds == ("ffn",)


@pytest.mark.parametrize("attention", ["mha", "sha", "mqa", "skv", "mhe_add"])
def test_the_width_of_heads_in_place_of_their_number(attention: str) -> None:
    """The scale stays: no slice changes it."""
    config = read(attention=attention, factors=..., layout="width_first")
    assert (config.kinds, config.axis_size, config.step, config.scale) == (("ffn", "head_width"), 8, 4, 8**-0.5)
    assert read(attention=attention, factors=..., layout="width_first", elastic_heads=False).kinds == ("ffn",)


def test_levels_of_a_nested_model() -> None:
    assert read().levels is None
    assert read(nested=True).levels == {"ffn": (0.25, 0.5, 0.75, 1.0), "heads": (0.25, 0.5, 0.75, 1.0)}
    assert read(nested=True, granularities={"ffn": [0.5, 1.0]}).levels == {"ffn": (0.5, 1.0)}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"num_attention_heads": 5},
            "num_attention_heads: 5 heads do not divide hidden_size 32; state head_dim where heads have another size",
        ),
        ({"factors": ...}, 'factors: expected "e" or "1+e", got None with mhe_mul'),
        ({"factors": "e", "attention": "mhe_add"}, "factors: expected with mhe_mul alone, got 'e' with mhe_add"),
        ({"softmax_scale": 0.0}, "softmax_scale: expected a number above 0, got 0"),
        ({"position": "rotary", "head_dim": 7}, "position: rotary positions need heads of even size, got 7"),
        (
            {"attention": "el_att", "factors": ..., "head_dim": 4},
            "head_dim: el_att reads keys and values from slices of the hidden state, so that 4 heads need size 8, ",
        ),
        (
            {"attention": "el_att", "factors": ..., "layout": "width_first"},
            "layout: el_att reads keys and values from slices of the hidden state; expected heads_first",
        ),
        ({"position": "rotary", "layout": "width_first"}, "layout: rotary positions turn each number of a head with o"),
        (
            {"granularities": {"heads": [1.0], "head_width": [1.0]}},
            "granularities: expected heads or head_width, got both; what layout has in front is one range of bytes",
        ),
        ({"head": "classifier"}, "num_labels: expected with head classifier alone, got None with classifier"),
        ({"num_labels": 3}, "num_labels: expected with head classifier alone, got 3 with none"),
        ({"granularities": {"experts": [1.0]}}, "granularities: this model has no axis kind 'experts'"),
        ({"num_hidden_layers": 1025}, "num_hidden_layers: expected at most 1024, got 1025"),
    ],
)
def test_what_makes_no_model_is_one_line(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: {re.escape(problem)}"):
        read(**changes)


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"config.json: .*rope_theta"):
        read(rope_theta=1e4)


def test_a_decoder_has_keys_of_its_own() -> None:
    data = {**ENCODER, "model_type": "mhe_decoder", "tie_word_embeddings": False}
    assert not config_from_json(MheDecoderConfig, data, "config.json").tie_word_embeddings
    with pytest.raises(CheckpointError, match=r"config.json: .*head"):
        config_from_json(MheDecoderConfig, {**data, "head": "none"}, "config.json")


PAIR: dict[str, Any] = {**ENCODER, "model_type": "mhe_encoder_decoder", "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("attention", "kinds"),
    [
        ("mhe_add", ("ffn", "heads", "cross_heads")),
        ("mqa", ("ffn", "heads", "cross_heads")),
        ("mha", ("ffn", "heads", "cross_heads")),
        ("skv", ("ffn", "heads", "cross_heads")),
        ("sha", ("ffn",)),
        ("el_att", ("ffn",)),
    ],
)
def test_heads_of_both_attentions_of_a_decoder_shrink(attention: str, kinds: tuple[str, ...]) -> None:
    data = {key: value for key, value in PAIR.items() if key != "factors"}
    config = config_from_json(MheEncoderDecoderConfig, {**data, "attention": attention}, "config.json")
    assert (config.kinds, config.decoder_layers) == (kinds, 2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"decoder_start_token_id": 40}, "decoder_start_token_id: expected a token of the vocabulary, 0..39, got 40"),
        ({"num_decoder_layers": 1025}, "num_decoder_layers: expected at most 1024, got 1025"),
        ({"position": "rotary"}, "position: expected learned in an encoder-decoder, whose attentions read two texts"),
        ({"num_attention_heads": 5}, "num_attention_heads: 5 heads do not divide hidden_size 32"),
    ],
)
def test_what_makes_no_translation_model(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: {re.escape(problem)}"):
        config_from_json(MheEncoderDecoderConfig, {**PAIR, **changes}, "config.json")


def test_a_translation_model_says_what_its_decoder_begins_with() -> None:
    with pytest.raises(CheckpointError, match=r"config.json: missing key 'decoder_start_token_id'"):
        config_from_json(MheEncoderDecoderConfig, {**ENCODER, "model_type": "mhe_encoder_decoder"}, "config.json")
