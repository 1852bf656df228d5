"""A small model of a configuration is one that still runs: sizes that must agree shrink alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from nestforge.exporters.hugging_face.small_model import random_model, smaller


def small(class_name: str, config: Any) -> Any:
    return random_model(getattr(transformers, class_name), type(config)(**smaller(config)), 10_000_000).eval()


@pytest.mark.parametrize(
    ("class_name", "config_class"),
    [("TextNetModel", "TextNetConfig"), ("HGNetV2Backbone", "HGNetV2Config"), ("MobileViTModel", "MobileViTConfig")],
)
def test_stages_in_several_settings_fit_together(class_name: str, config_class: str) -> None:
    model = small(class_name, getattr(transformers, config_class)())
    with torch.no_grad():
        model(torch.zeros(1, 3, 64, 64))


def test_lists_of_stages_shrink_by_one_factor_and_never_grow() -> None:
    changed = smaller(transformers.HGNetV2Config())
    assert changed["stem_channels"] == [3, 4, 4]
    assert changed["stage_in_channels"] == [4, 4, 8, 16]
    assert changed["stage_out_channels"] == [4, 8, 16, 32]


def test_text_and_image_of_siglip_end_in_one_width() -> None:
    model = small("SiglipModel", transformers.SiglipConfig())
    side = model.config.vision_config.image_size
    with torch.no_grad():
        answer = model(input_ids=torch.ones(2, 7, dtype=torch.int64), pixel_values=torch.zeros(2, 3, side, side))
    assert answer.logits_per_text.shape == (2, 2)


def test_tokens_of_gemma_4_are_those_of_each_layer_too() -> None:
    config = transformers.Gemma4TextConfig()
    changed = smaller(config)
    assert changed["vocab_size_per_layer_input"] == changed["vocab_size"] == 128
    model = small("Gemma4ForCausalLM", config)
    with torch.no_grad():
        assert model(input_ids=torch.full((1, 3), 127)).logits.shape == (1, 3, 128)
