"""Encoder-decoders that no family names: what their bundles write, whole and cut, beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.job import resolve
from nestforge.errors import PlanError
from nestforge.exporters.source import open_source
from nestforge.profiles.compile_request import CompileRequest
from nestforge.runtime.load import load
from safetensors.torch import load_file, save_file
from support.tiny_compile import board
from support.tiny_models import edit_config

SIZES: dict[str, Any] = {"d_model": 32, "vocab_size": 96, "max_position_embeddings": 64, "eos_token_id": None}
for _side in ("encoder", "decoder"):
    SIZES |= {f"{_side}_layers": 1, f"{_side}_ffn_dim": 32, f"{_side}_attention_heads": 4}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    # The first and the last token are stated; positions are a table that counts from 2.
    "bart": ("BartForConditionalGeneration", {"forced_bos_token_id": 7, "forced_eos_token_id": 2}),
    # Begins with the token of padding; positions are sines in a table.
    "marian": (
        "MarianMTModel",
        {"pad_token_id": 95, "decoder_start_token_id": 95, "forced_eos_token_id": None, "decoder_vocab_size": 96},
    ),
    # States no token that a decoder begins with.
    "mbart": ("MBartForConditionalGeneration", {"bos_token_id": 4}),
    "speech_to_text": (
        "Speech2TextForConditionalGeneration",
        {"max_source_positions": 96, "input_feat_per_channel": 8, "conv_channels": 8},
    ),
    # Distances are biases of each layer; the head has a matrix of its own, which transformers would tie.
    "umt5": (
        "UMT5ForConditionalGeneration",
        {"num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 32, "decoder_start_token_id": 0},
    ),
    # Positions count tokens behind that of padding, which the decoder begins with here.
    "m2m_100": ("M2M100ForConditionalGeneration", {"pad_token_id": 1, "decoder_start_token_id": 1}),
}
TOKENS = 12
PROMPTS = [[5], [9, 31, 64, 17, 80, 12, 44], [*range(20, 37)]]


def save(folder: Path, model_type: str) -> Path:
    """A random model, with small embeddings of tokens so that texts vary, whose steps keep their order."""
    import transformers

    name, settings = CLASSES[model_type]
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(model_type, **{**SIZES, **settings}))
    if model_type == "umt5":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.config.tie_word_embeddings = False
    for place, parameter in model.named_parameters():
        if "norm" not in place and parameter.requires_grad:
            size = 1.0 if "positions" in place or "bias.weight" in place else 0.3 if "layer" in place else 0.03
            parameter.data = size * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return edit_config(folder, nested=True)


def written_by_transformers(folder: Path, model_type: str) -> list[tuple[int, ...]]:
    import transformers

    module: Any = getattr(transformers, CLASSES[model_type][0]).from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False, "num_beams": 1}
        found.append(tuple(module.generate(ids, **given)[0, 1:].tolist()))
    return found


@pytest.mark.parametrize("model_type", ["bart", "marian", "m2m_100", "umt5"])
def test_text_is_that_of_transformers_whole_and_cut(tmp_path: Path, model_type: str) -> None:
    folder, half = save(tmp_path / "m", model_type), save(tmp_path / "half", model_type)
    source = open_source(folder)
    assert source.family.name == "general"
    small = "ffn16-heads2-heads_b2"  # of the decoder's attention to the prompt too
    options = {"submodels": [small], "include": "budgets", "generate": True}
    profile = board(buckets=["1x8"], budgets={"full": {}})
    model = load(compile_bundle(model=folder, output=tmp_path / "b", profile=profile, **options))
    # Without the second half of the neurons and heads of every layer, transformers' own class adds zeros for them.
    weights = load_file(half / "model.safetensors")
    for cut in source.spec.slices:
        kept = weights[cut.parameter].shape[cut.dim] // 2
        weights[cut.parameter].narrow(cut.dim, kept, kept).zero_()
    save_file(weights, half / "model.safetensors", {"format": "pt"})
    written = {}
    (whole,) = (each.id for each in model.submodels if each.id != small)
    for of, submodel in ((half, small), (folder, whole)):
        expected = written[submodel] = written_by_transformers(of, model_type)
        assert len(set(expected)) == 3
        assert len({token for text in expected for token in text}) > 2
        assert max(len(set(text)) for text in expected) > 1
        rows = model.generate(PROMPTS, max_tokens=TOKENS, submodel=submodel).rows
        assert [row.tokens for row in rows] == expected
        for prompt, text in zip(PROMPTS, expected, strict=True):
            assert model.generate(prompt, max_tokens=TOKENS, submodel=submodel).rows[0].tokens == text
    assert written[small] != written[whole]
    assert model.bundle.manifest.generation is not None
    encoder = model.bundle.manifest.generation.encoder
    assert encoder is not None
    stated = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
    config = json.loads((folder / "generation_config.json").read_text())
    assert [encoder.start_id, encoder.first_id, encoder.last_id] == [config.get(name) for name in stated]


def test_a_decoder_begins_as_texts_do_where_its_folder_states_nothing_else(tmp_path: Path) -> None:
    cached = open_source(save(tmp_path / "m", "mbart")).architecture.cached
    assert cached is not None
    assert cached.problem is None
    assert cached.encoder is not None
    assert cached.encoder.start == 4


def cannot(folder: Path) -> str:
    request = CompileRequest(model=folder, output=folder.parent / "b", profile="raspberry-pi-5", generate=True)
    with pytest.raises(PlanError) as failure:
        resolve(request)
    return str(failure.value)


def test_why_an_encoder_decoder_cannot_generate(tmp_path: Path) -> None:
    folder = edit_config(save(tmp_path / "bart", "bart"), decoder_start_token_id=None, bos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert "decoder_start_token_id: expected a token of the vocabulary, 0..95, with which" in cannot(folder)
    heard = save(tmp_path / "heard", "speech_to_text")
    assert "Speech2TextForConditionalGeneration takes input_features beside the text" in cannot(heard)
