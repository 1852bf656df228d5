"""Tests."""

from __future__ import annotations

import pytest
from nestforge.exporters.families.mhe.forms import folded_shapes, folded_slices
from nestforge.exporters.families.mhe.shapes import (
    attention_shapes,
    decoder_shapes,
    elastic_spec,
    encoder_decoder_shapes,
    encoder_shapes,
    parameter_group,
)
from support.tiny_mhe import decoder_config, encoder_config, pair_config, tiny_mhe


@pytest.mark.parametrize("attention", ["mha", "sha", "mqa", "skv", "el_att", "mhe_add", "mhe_mul"])
@pytest.mark.parametrize("bias", [False, True])
def test_shapes_are_the_modules_own(attention: str, bias: bool) -> None:
    encoder = encoder_config(attention=attention, attention_bias=bias, head="masked_lm")
    decoder = decoder_config(attention=attention, attention_bias=bias, tie_word_embeddings=False, position="rotary")
    classifier = encoder_config(attention=attention, head="classifier", num_labels=3)
    pair = pair_config(attention=attention, attention_bias=bias, num_decoder_layers=2)
    for config, shapes in (
        (pair, encoder_decoder_shapes(pair)),
        (encoder, encoder_shapes(encoder)),
        (decoder, decoder_shapes(decoder)),
        (classifier, encoder_shapes(classifier)),
    ):
        assert shapes == {name: tuple(value.shape) for name, value in tiny_mhe(config).named_parameters()}


def test_a_tables_name_says_how_it_is_stored() -> None:
    stored = {factors: attention_shapes(encoder_config(factors=factors), "a") for factors in ("e", "1+e")}
    assert stored["e"]["a.embedding.query"] == stored["1+e"]["a.factor.query"] == (4, 8)
    assert "a.factor.query" not in stored["e"]
    assert attention_shapes(encoder_config(attention="mhe_add"), "a")["a.embedding.value"] == (4, 8)


def test_what_shrinks_with_heads() -> None:
    config = encoder_config(num_hidden_layers=1)
    spec = elastic_spec(config, encoder_shapes(config))
    submodel = spec.from_kinds({"heads": [3]})
    found = {
        name: spec.shape_of(name, shape, submodel)
        for name, shape in {
            **attention_shapes(config, "layers.0.attention"),
            **folded_shapes(config, "layers.0.attention"),
        }.items()
    }
    at = "layers.0.attention."
    assert {name.removeprefix(at): shape for name, shape in found.items()} == {
        "query.weight": (8, 32),
        "key.weight": (8, 32),
        "value.weight": (8, 32),
        "output.weight": (32, 24),
        **{f"embedding.{role}": (3, 8) for role in ("query", "key", "value")},
        "folded.query": (3, 8),
        "folded.output": (32, 24),
        "folded.queries.weight": (24, 32),
        **{f"expanded.{role}.weight": (24, 32) for role in ("query", "key", "value")},
    }


def test_folds_of_mhe_add_have_biases() -> None:
    shapes = folded_shapes(encoder_config(attention="mhe_add"), "a")
    assert shapes["a.folded.key"] == (8, 32)
    assert shapes["a.folded.queries.bias"] == shapes["a.expanded.value.bias"] == (32,)
    assert folded_slices(encoder_config(attention="mhe_add"), "a", "h")["a.folded.key"] is None
    assert folded_shapes(encoder_config(attention="mqa"), "a") == {}


def test_without_elastic_heads_nothing_of_attention_shrinks() -> None:
    config = encoder_config(elastic_heads=False)
    spec = elastic_spec(config, encoder_shapes(config))
    assert {cut.axis for cut in spec.stored_slices} == {"layers.0.ffn", "layers.1.ffn"}


def test_groups_of_the_papers_tables() -> None:
    assert parameter_group("layers.0.attention.query.weight") == "attention q/k/v"
    assert parameter_group("layers.0.attention.factor.value") == "attention q/k/v"
    assert parameter_group("layers.0.attention.output.weight") == "attention output"
    assert parameter_group("decoder.layers.0.cross_attention.output.weight") == "attention output"
    assert parameter_group("decoder.layers.0.cross_attention.embedding.key") == "attention q/k/v"
    assert parameter_group("decoder.layers.0.cross_attention_norm.weight") is None
    assert parameter_group("layers.0.attention.query.bias") is None
    assert parameter_group("layers.0.ffn.up.weight") is None
