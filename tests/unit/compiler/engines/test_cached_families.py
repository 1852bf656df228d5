"""Decoders of every kind and causal classes that no family names, compiled to generate: texts are those of
transformers."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import nestforge
import onnx
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import ParityError
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.matformer import model as matformer
from nestforge.exporters.families.matformer.model import buckets_between
from nestforge.exporters.family import load_model
from nestforge.exporters.source import open_source
from nestforge.runtime.load import load
from safetensors.torch import load_file, save_file
from support.gated_decoders import save_decoder
from support.generating import greedy
from support.tiny_compile import board
from support.tiny_matlm import save_tiny_matlm
from support.tiny_models import edit_config, save_gpt2

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
