"""Decoders of every kind, compiled to generate: 128 tokens, the most likely each time, are those of transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import nestforge
import onnx
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.errors import ParityError
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.matformer import model as matformer
from nestforge.exporters.families.matformer.model import buckets_between
from nestforge.exporters.family import load_model
from support.gated_decoders import save_decoder
from support.generating import greedy
from support.tiny_matlm import save_tiny_matlm
from support.tiny_models import save_gpt2

_PROMPT, _TOKENS = [5, 7, 9, 11, 3], 128
# Behind which a window slides within the answer: its buffers have room for it and a run of 512 tokens.
_LONG_PROMPT = [3 + 7 * number**2 % 45 for number in range(480)]
_COMMON: dict[str, Any] = {"head_dim": 8, "max_position_embeddings": 140, "eos_token_id": None}
_LONG = {"rope_type": "longrope", "rope_theta": 1e3, "short_factor": [1.5, 2.0], "long_factor": [4.0, 9.0]}
_SLIDING = {"max_position_embeddings": 610, "sliding_window": 5}
# Texts of 140 tokens, which a class of longer ones would turn otherwise from 141 on; or long ones, behind a window.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {"num_hidden_layers": 1, "head_dim": 32, **_SLIDING}),
    "phi3, longrope": (
        "phi3",
        {
            "num_hidden_layers": 1,
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
            "num_hidden_layers": 3,
            "intermediate_size": [32, 16, 32],
            "activation_sparsity_pattern": [0.5, 0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_kv_shared_layers": 1,  # the last, which reads what the first keeps of its window
            "head_dim": 16,
            **_SLIDING,
        },
    ),
    "llama, dynamic": (
        "llama",
        {
            "num_hidden_layers": 1,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0},
        },
    ),
}
# Layers whose attention turns queries and keys itself: of heads, and parts of them, of a multiple of 16 numbers.
TURNED = {"phi3": 1, "gemma3n": 3, "llama, dynamic": 1}
# Those whose attention takes queries, keys and values as one input: nothing lies between it and their one product.
PACKED = {"phi3": 1, "gpt2": 2, "llama, dynamic": 1}


@pytest.mark.parametrize("kind", DECODERS)
def test_text_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    model_type, keys = DECODERS[kind]
    save = save_gpt2 if model_type == "gpt2" else partial(save_decoder, model_type=model_type)
    folder = save(tmp_path / "m", **{**_COMMON, **keys})
    path = compiled(folder, tmp_path / "b")
    bundle = nestforge.open_bundle(path)
    generation = bundle.manifest.generation
    assert generation is not None
    graph = onnx.load(bundle.file(generation.engines[0].file), load_external_data=False).graph
    turned = [attribute.i for node in graph.node for attribute in node.attribute if attribute.name == "do_rotary"]
    assert sum(turned) == TURNED.get(kind, 0)
    packed = [node for node in graph.node if node.op_type == "GroupQueryAttention" and not any(node.input[1:3])]
    assert len(packed) == PACKED.get(kind, 0)
    slides = keys.get("sliding_window") is not None
    assert generation.positions == (610 if slides else 140)
    prompt = _LONG_PROMPT if slides else _PROMPT
    with nestforge.load(path, threads=1) as model:
        row = model.generate(prompt, max_tokens=_TOKENS, capacity=generation.positions).rows[0]
        assert list(row.tokens) == greedy(folder, prompt, _TOKENS)


def test_a_relative_bias_is_that_of_the_model(tmp_path: Path) -> None:
    """MatLM's: a bias by distance and head, added to scores over the cache."""
    folder = save_tiny_matlm(tmp_path / "m", position="relative_bias")
    model, tokens = load_model(folder), [5, 7, 9]
    with torch.no_grad():
        for layer in model.layers:
            layer.relative_bias.weight.normal_(std=2.0)
        save_model(model, model.config, folder)
        while len(tokens) < model.config.max_position_embeddings:
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    with nestforge.load(compiled(folder, tmp_path / "b"), threads=1) as bundle:
        assert list(bundle.generate(tokens[:3], max_tokens=len(tokens) - 3).rows[0].tokens) == tokens[3:]


def test_a_bias_of_other_distances_stops_the_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nearer(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return buckets_between(queries - int(queries.dim() > 1), keys)  # rows of tokens: of the cached pass alone

    monkeypatch.setattr(matformer, "buckets_between", nearer)
    short = {"num_hidden_layers": 1, "position": "relative_bias", "max_position_embeddings": 38}
    with pytest.raises(ParityError, match=r"cached@b1_64-s1_38: .*first to diverge: layers.0.relative_bias"):
        compiled(save_tiny_matlm(tmp_path / "m", **short), tmp_path / "b")


def compiled(folder: Path, output: Path) -> Path:
    options = {"buckets": [Bucket(1, 8)], "include": "budgets", "measure": False}
    return nestforge.compile(folder, "raspberry-pi-5", output, generate=True, **options)
