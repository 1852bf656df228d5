from __future__ import annotations

import re
from typing import Any

import pytest
from nestforge.elastic import Axis, Submodel
from nestforge.exporters.checkpoints.own_folder import config_from_json
from nestforge.exporters.families.coda.encoder_decoder_config import CodaEncoderDecoderConfig, of_encoder
from support.tiny_coda import OF_IMAGES
from support.tiny_coda_t5 import encoder_config, pair_config


def test_it_reads_back() -> None:
    config = pair_config(eos_token_id=(1, 2), tie_word_embeddings=False)
    assert config_from_json(CodaEncoderDecoderConfig, config.to_json(), "config.json") == config
    assert (config.decoder.decoder_layers, config.decoder.heads, config.decoder.head_dim) == (1, 3, 8)


@pytest.mark.parametrize(
    ("encoder", "changes", "problem"),
    [
        ({"reduction": 2}, {}, r"encoder: reductions: \[3, 1\] lack 2"),
        (OF_IMAGES, {}, "encoder: image: got .* before a decoder of T5; expected none"),
        ({"num_labels": 3}, {}, "encoder: num_labels: got 3 before a decoder of T5; expected none"),
        ({"norm": "layer"}, {}, "encoder: norm: got layer before a decoder of T5; expected rms"),
        ({}, {"decoder_start_token_id": 40}, "decoder_start_token_id: expected a token of the vocabulary, 0..39, got"),
        ({}, {"eos_token_id": (1, 50)}, "eos_token_id: expected a token of the vocabulary, 0..39, got 50"),
    ],
)
def test_what_makes_no_model(encoder: dict[str, Any], changes: dict[str, Any], problem: str) -> None:
    found = pair_config(encoder_config(**encoder), **changes).problem()
    assert found is not None
    assert re.match(problem, found)


def test_a_submodel_of_both_sides_names_one_of_the_encoder() -> None:
    axes = (Axis("encoder.layers.0.ffn", 8), Axis("decoder.layers.0.ffn", 8), Axis("coda.reduction", 1, (3, 1)))
    found = of_encoder(Submodel(tuple(zip(axes, (4, 8, 3), strict=True))))
    assert [(axis.name, value) for axis, value in found.values] == [("layers.0.ffn", 4), ("coda.reduction", 3)]
