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
    ],
    ids=["both sides", "one of them", "another key", "one side"],
)
def test_an_answer_passes_through_the_layers_of_both_sides(config: transformers.PreTrainedConfig, layers: int) -> None:
    assert depth(SimpleNamespace(config=config)) == layers
