"""Decoders of every kind, compiled to generate: 128 tokens, the most likely each time, are those of transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.elastic import Bucket
from support.gated_decoders import save_decoder
from support.greedy import greedy
from support.tiny_gpt2 import save_gpt2

_PROMPT, _TOKENS = [5, 7, 9, 11, 3], 128
_COMMON: dict[str, Any] = {"head_dim": 8, "max_position_embeddings": 140, "eos_token_id": None}
_LONG = {"rope_type": "longrope", "rope_theta": 1e3, "short_factor": [1.5, 2.0], "long_factor": [4.0, 9.0]}
# Texts of 140 tokens, which a class of longer ones would turn otherwise from 141 on.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {}),
    "phi3, longrope": (
        "phi3",
        {
            "hidden_size": 32,
            "max_position_embeddings": 300,
            "original_max_position_embeddings": 140,
            "rope_parameters": _LONG,
        },
    ),
    "gpt2": ("gpt2", {"n_positions": 140, "scale_attn_by_inverse_layer_idx": True}),
    "gemma3n": (
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "intermediate_size": [32, 16, 32, 16],
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,
        },
    ),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0}}),
}


@pytest.mark.parametrize("kind", DECODERS)
def test_text_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    model_type, keys = DECODERS[kind]
    save = save_gpt2 if model_type == "gpt2" else partial(save_decoder, model_type=model_type)
    folder = save(tmp_path / "m", **{**_COMMON, **keys})
    options = {"buckets": [Bucket(1, 8)], "include": "budgets", "submodels": ["ffn8"], "measure": False}
    path = nestforge.compile(folder, "raspberry-pi-5", tmp_path / "b", generate=True, **options)
    generation = nestforge.open_bundle(path).manifest.generation
    assert generation is not None
    assert generation.positions == 140
    with nestforge.load(path, threads=1) as model:
        assert list(model.generate(_PROMPT, max_tokens=_TOKENS).rows[0].tokens) == greedy(folder, _PROMPT, _TOKENS)
