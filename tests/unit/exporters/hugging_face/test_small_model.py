"""Changes that make a configuration small: which layers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from nestforge.exporters.hugging_face.small_model import smaller

_WINDOW, _FULL, _CONV = "sliding_attention", "full_attention", "conv"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.BertConfig(), {"num_hidden_layers": 2}),
        (
            transformers.Lfm2Config(num_hidden_layers=4, layer_types=[_CONV, _CONV, _FULL, _CONV]),
            {"num_hidden_layers": 3, "layer_types": [_CONV, _FULL, _CONV]},
        ),
        # By their position, in periods.
        (
            transformers.JambaConfig(),
            {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1},
        ),
        (transformers.Qwen2MoeConfig(decoder_sparse_step=4), {"num_hidden_layers": 2, "decoder_sparse_step": 2}),
        # The first ten layers are sparse, the last fifteen read keys and values of others of their type.
        (
            transformers.Gemma3nTextConfig(),
            {
                "num_hidden_layers": 6,
                "layer_types": [_WINDOW, _FULL] * 3,
                "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
                "num_kv_shared_layers": 2,
            },
        ),
        # Sizes that a configuration leaves out, as classes that need none have them.
        (
            transformers.DeepseekV2Config(num_experts_per_tok=None),
            {"num_experts_per_tok": 2, "n_routed_experts": 4},
        ),
        (transformers.MinistralConfig(), {"head_dim": 8, "num_key_value_heads": 2}),
        (transformers.NemotronConfig(num_key_value_heads=None), {"num_key_value_heads": 4}),
        # Names of stages are no kinds.
        (transformers.FocalNetConfig(out_features=["stage1", "stage4"]), {"depths": [1, 1, 1, 1]}),
    ],
)
def test_layers(config: Any, expected: dict[str, Any]) -> None:
    found = smaller(config)
    assert {name: found[name] for name in expected} == expected


def test_layers_that_read_the_keys_of_others_find_them() -> None:
    stated = transformers.Gemma3nTextConfig()
    small = transformers.Gemma3nTextConfig(**{**stated.to_dict(), **smaller(stated)})
    with torch.device("meta"):
        layers = transformers.Gemma3nForCausalLM(small).model.layers
    assert [layer.self_attn.is_kv_shared_layer for layer in layers] == [False] * 4 + [True] * 2


def test_changes_of_layers_go_with_the_layers_that_stay() -> None:
    found = smaller(transformers.EmbeddingGemma2TextConfig())
    layers = found["layer_types"]
    assert found["num_hidden_layers"] == len(layers)
    assert set(found["per_layer_config"]) == {number for number, kind in enumerate(layers) if kind == _FULL}


def test_stages_of_a_part_are_its_own_where_it_has_fewer_layers() -> None:
    config = transformers.DepthProConfig()
    small = transformers.DepthProConfig(**smaller(config))
    assert small.image_model_config.num_hidden_layers == 2


def test_as_many_stages_stay() -> None:
    found = smaller(transformers.RTDetrConfig())
    assert found["backbone_config"]["out_features"] == ["stage2", "stage3", "stage4"]
    assert "encode_proj_layers" not in found
