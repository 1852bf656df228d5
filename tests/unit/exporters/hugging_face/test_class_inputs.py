"""What a class takes, by its forward and its configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import transformers
from nestforge.exporters.hugging_face.class_inputs import depth

BART = {"encoder_layers": 3, "decoder_layers": 2}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (transformers.BartConfig(**BART), 5),
        (transformers.BartConfig(**BART, is_encoder_decoder=False), 3),
        (transformers.LongT5Config(num_layers=2, num_decoder_layers=1), 3),
        (transformers.BertConfig(num_hidden_layers=4), 4),
        (transformers.SwinConfig(depths=[2, 2, 6, 2]), 12),
        (transformers.CvtConfig(depth=[1, 2, 10]), 13),
        (
            transformers.DeformableDetrConfig(
                encoder_layers=2, decoder_layers=3, backbone_config=transformers.ResNetConfig(depths=[1, 2, 1, 1])
            ),
            10,
        ),
    ],
    ids=[
        "both sides",
        "one of them",
        "another key",
        "one side",
        "stages",
        "stages of another key",
        "a backbone before",
    ],
)
def test_an_answer_passes_through_the_layers_of_both_sides_of_stages_and_of_a_backbone(
    config: transformers.PreTrainedConfig, layers: int
) -> None:
    assert depth(SimpleNamespace(config=config)) == layers
