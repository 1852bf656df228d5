"""Causal classes that no family names: texts of both forms of their engines, whole and cut, beside transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.compiler.compile import compile_bundle
from nestforge.exporters.source import open_source
from nestforge.runtime.load import load
from safetensors.torch import load_file, save_file
from support.tiny_compile import board
from support.tiny_models import edit_config

# Sizes, and the key of the FFN's width.
CLASSES: dict[str, tuple[str, dict[str, Any], str]] = {
    # Attention is the operator's: a window, and two heads of queries to one of keys.
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "sliding_window": 10,
            "max_position_embeddings": 64,
        },
        "intermediate_size",
    ),
    # A pass leaves frequencies in the class; positions end at the original length.
    "arcee": (
        "ArceeForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0, 1.5, 2.0, 1.0],
                "long_factor": [4.0, 3.0, 2.0, 5.0],
            },
        },
        "intermediate_size",
    ),
    # Attention is the class's own, over buffers.
    "gptj": (
        "GPTJForCausalLM",
        {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_inner": 32, "rotary_dim": 4, "n_positions": 64},
        "n_inner",
    ),
    # The class takes no positions and counts them; its heads have another size than a multiple of 8.
    "bart": (
        "BartForCausalLM",
        {
            "d_model": 24,
            "decoder_layers": 1,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 32,
            "max_position_embeddings": 64,
            "forced_eos_token_id": None,
            "is_decoder": True,
            "is_encoder_decoder": False,
            "encoder_layers": 1,
        },
        "decoder_ffn_dim",
    ),
    # Positions are complex numbers; a layer sees its chunk alone, another all before, by queries scaled by places.
    "llama4_text": (
        "Llama4ForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size_mlp": 32,
            "moe_layers": [],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 6,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "max_position_embeddings": 64,
        },
        "intermediate_size_mlp",
    ),
}
VOCABULARY, TOKENS = 96, 12
PROMPTS = [[5], [9, 31, 64, 17, 80, 12, 44], [*range(20, 37)]]


def save(folder: Path, model_type: str, weights: Mapping[str, torch.Tensor] | None = None, **settings: Any) -> Path:
    """A random model, or one of ``weights``, whose texts have no end and whose steps keep their order."""
    import transformers

    name, sizes, _ = CLASSES[model_type]
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, "vocab_size": VOCABULARY, **settings})
    config.eos_token_id = None
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    if weights is not None:
        save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
    return edit_config(folder, nested=True)


def written_by_transformers(folder: Path, model_type: str) -> list[tuple[int, ...]]:
    import transformers

    module: Any = getattr(transformers, CLASSES[model_type][0]).from_pretrained(folder, dtype=torch.float32).eval()
    module.generation_config = transformers.GenerationConfig(pad_token_id=0)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False}
        found.append(tuple(module.generate(ids, **given)[0, len(prompt) :].tolist()))
    return found


@pytest.mark.parametrize("model_type", CLASSES)
def test_text_is_that_of_transformers_whole_and_cut(tmp_path: Path, model_type: str) -> None:
    folder, width = save(tmp_path / "m", model_type), CLASSES[model_type][2]
    source = open_source(folder)
    assert source.family.name == "general"
    profile = board(buckets=["1x8"], budgets={"full": {}})
    options = {"levels": {"ffn": [0.5, 1.0]}, "generate": True}
    model = load(compile_bundle(model=folder, output=tmp_path / "b", profile=profile, **options))
    # The first half of what every axis of neurons counts, in transformers' own class of half the width.
    weights = load_file(folder / "model.safetensors")
    for cut in source.spec.slices:
        if cut.axis.endswith("ffn") and cut.parameter in weights:
            kept = weights[cut.parameter].shape[cut.dim] // 2
            weights[cut.parameter] = weights[cut.parameter].narrow(cut.dim, 0, kept).contiguous()
    narrow = save(
        tmp_path / "half", model_type, weights, **{width: json.loads((folder / "config.json").read_text())[width] // 2}
    )
    small, *_, whole = sorted((found.id for found in model.submodels), key=lambda name: int(name.split("-")[0][3:]))
    for of, submodel in ((narrow, small), (folder, whole)):
        expected = written_by_transformers(of, model_type)
        assert len({token for text in expected for token in text}) > 3
        rows = model.generate(PROMPTS, max_tokens=TOKENS, submodel=submodel).rows
        assert [row.tokens for row in rows] == expected
        for prompt, text in zip(PROMPTS, expected, strict=True):
            assert model.generate(prompt, max_tokens=TOKENS, submodel=submodel).rows[0].tokens == text
