"""What is refused of a gated decoder, each with one line that says where and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.errors import CheckpointError, UnsupportedModelError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from safetensors.torch import load_file, save_file
from support.gated_decoders import edit_config, save_decoder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_decoder(tmp_path / "m", num_hidden_layers=2)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as failure:
        open_source(folder).spec  # noqa: B018  (a property that reads the folder)
    message = str(failure.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"intermediate_size": [32]}, "intermediate_size: expected 2 numbers, one per layer, got 1"),
        ({"intermediate_size": [32, 0]}, "intermediate_size: expected whole numbers of at least 1, got 0"),
        ({"intermediate_size": None}, "intermediate_size: expected whole numbers of at least 1, got None"),
        (
            {"architectures": ["MistralModel"]},
            "architectures: expected one of LlamaModel, LlamaForCausalLM, LlamaForSequenceClassification, "
            "LlamaForTokenClassification, LlamaForQuestionAnswering, got MistralModel",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 1024, got 1000000000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 4 heads cannot share 3 pairs of keys and values"),
        ({"hidden_size": "16"}, "hidden_size: expected a whole number, got str '16'"),
        ({"use_bidirectional_attention": True}, "positions that see later ones are not supported"),
        ({"is_causal": False}, "is_causal: positions that see later ones are not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantized weights are not supported"),
        ({"granularities": {"ffn": [0.5]}}, "granularities: ffn: expected fractions that increase from above 0 to 1"),
        ({"nested": "yes"}, "nested: expected true or false"),
    ],
)
def test_configurations(folder: Path, changes: dict[str, Any], expected: str) -> None:
    message = refusal(edit_config(folder, **changes))
    assert message.startswith(f"{folder / 'config.json'}: ")
    assert expected in message


def test_a_missing_key(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size"', '"vocabulary"'))
    assert refusal(folder) == f"{config}: missing key 'vocab_size'"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("model.layers.1.mlp.gate_proj.weight"), "gate_proj.weight is missing from the weights"),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(24, 16)}),
            "tensor model.layers.1.mlp.up_proj.weight has shape [24, 16]; expected [32, 16] as config.json says",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale": torch.zeros(1)}),
            "tensor 'model.layers.0.mlp.up_proj.weight_scale' has no place in the model that config.json describes",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}),
            "tensor model.norm.weight holds I8; expected F32, F16 or BF16",
        ),
    ],
    ids=["missing", "misfit", "unknown", "integers"],
)
def test_weights_that_do_not_fit_config_json(folder: Path, change: Any, expected: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert refusal(folder).endswith(expected)


def test_widths_that_are_not_those_of_the_weights(folder: Path) -> None:
    edit_config(folder, intermediate_size=[32, 24])
    assert refusal(folder).endswith(
        "tensor model.layers.1.mlp.gate_proj.weight has shape [32, 16]; expected [24, 16] as config.json says"
    )


def test_constants_of_old_files_are_passed_over(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "inv_freq" not in " ".join(load_universal(open_source(folder)).parameters())


def test_what_transformers_itself_refuses_is_one_line(folder: Path) -> None:
    edit_config(folder, hidden_act="no such function")
    with pytest.raises(CheckpointError, match="transformers cannot load it") as failure:
        load_universal(open_source(folder))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers: expected fewer than the 3 layers, got 3"),
        (
            {"activation_sparsity_pattern": [0.5]},
            "activation_sparsity_pattern: expected 3 numbers, one per layer, got 1",
        ),
        ({"intermediate_size": [32, 16]}, "intermediate_size: expected 3 numbers, one per layer, got 2"),
    ],
)
def test_gemma_3n(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    folder = edit_config(save_decoder(tmp_path / "m", "gemma3n_text"), **changes)
    assert refusal(folder) == f"{folder / 'config.json'}: {expected}"


def test_the_multimodal_folder_names_the_text_model(folder: Path) -> None:
    edit_config(folder, model_type="gemma3n")
    with pytest.raises(UnsupportedModelError, match=r"'gemma3n' is not supported; supported are .*gemma3n_text"):
        open_source(folder)
