"""Refusals of config.json: one line that names the key, on the command line too."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import open_checkpoint
from nestforge.exporters.checkpoints.config import offline_transformers
from nestforge.exporters.hugging_face.interface import Loading
from nestforge.exporters.hugging_face.transformers_model import load_transformers
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from safetensors.torch import load_file, save_file
from support.hugging_face_classes import save_class
from support.refusals import refused
from support.tiny_models import edit_config

MODELS = {"bert": "BertModel", "llama": "LlamaForCausalLM", "vit": "ViTModel"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saved")
    return {kind: save_class(root / kind, kind, name) for kind, name in MODELS.items()}


@pytest.fixture
def copy(saved: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(saved[kind], tmp_path / "m"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map: the folder brings code of its own, which is never run"),
    ({"quantization_config": {"bits": 4}}, "quantization_config: quantized weights are not supported"),
    ({"compression_config": {"format": "int8"}}, "compression_config: quantized weights are not supported"),
    (
        {"attn_implementation": "kernels-community/flash-attn"},
        "attn_implementation: expected eager or sdpa, got 'kernels-community/flash-attn'; other kernels are neither "
        "fetched nor run: remove the key",
    ),
    ({"_attn_implementation": "flash_attention_2"}, "_attn_implementation: expected eager or sdpa, got 'flash_atten"),
    (
        {"attn_implementation": {"": "hub/kernel"}},
        "attn_implementation: expected eager or sdpa, got {'': 'hub/kernel'}",
    ),
    ({"per_layer_config": {"0": {"hidden_act": "relu"}}}, "per_layer_config: layers that differ in more than"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key' is not supported"),
    ({"position_embedding_type": "alibi"}, "position_embedding_type: 'alibi' is not supported"),
    ({"alibi": True}, "alibi: linear biases of attention (ALiBi) are not supported"),
    ({"add_cross_attention": True}, "add_cross_attention: a second sequence to attend to is not supported"),
    ({"pruned_heads": {"0": [1]}}, "pruned_heads: heads that are gone from some layers are not supported"),
    ({"hidden_act": "xielu"}, "hidden_act: xielu has parameters of its own (a learned activation), which is not supp"),
    ({"hidden_act": "prelu"}, "hidden_act: prelu has parameters of its own (a learned activation), which is not supp"),
]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("changes", "problem"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(
    copy: Callable[[str], Path], kind: str, changes: dict[str, Any], problem: str
) -> None:
    folder = edit_config(copy(kind), **changes)
    with pytest.raises(CheckpointError) as failure:
        open_source(folder)
    assert str(failure.value).startswith(f"{folder / 'config.json'}: {problem}")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "eager", "position_embedding_type": "absolute", "quantization_config": None},
        {"pruned_heads": {}, "alibi": False, "chunk_size_feed_forward": 3, "use_cache": True},
    ],
)
def test_what_changes_nothing_is_taken(copy: Callable[[str], Path], changes: dict[str, Any]) -> None:
    folder = copy("bert")
    feeds = [torch.full((2, 8), 5), torch.ones(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64)]
    expected = load_universal(open_source(folder)).module(*feeds)
    found = load_universal(open_source(edit_config(folder, **changes))).module(*feeds)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


def test_an_adapter_beside_the_model_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("bert")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/else"}))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: adapters are not supported; merge the adapter"):
        open_source(folder)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("bert", "encoder.layer.0.attention.self.query.lora_A.weight"),
        ("bert", "encoder.layer.0.output.adapters.task.adapter_down.0.weight"),
        ("bert", "encoder.layer.0.attention.self.distance_embedding.weight"),
        ("llama", "model.layers.0.self_attn.q_proj.lora_A.weight"),
        ("vit", "encoder.layer.0.output.adapter.weight"),
    ],
)
def test_tensors_that_the_class_would_pass_over_are_refused(copy: Callable[[str], Path], kind: str, name: str) -> None:
    path = copy(kind) / "model.safetensors"
    save_file({**load_file(path), name: torch.ones(2, 2)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has no place in the model that config\.json describes$"):
        open_source(path.parent)


@pytest.mark.parametrize(("kind", "expected"), [("bert", 0), ("llama", 0)])
def test_padding(copy: Callable[[str], Path], kind: str, expected: int) -> None:
    folder = copy(kind)
    for none in (None, -1):
        source = open_source(edit_config(folder, pad_token_id=none))
        assert source.signature.inputs[0].pad == expected
    with pytest.raises(
        CheckpointError, match=r"pad_token_id: expected a token of the vocabulary, 0\.\.47, or null, got 48$"
    ):
        open_source(edit_config(folder, pad_token_id=48))


def test_padding_that_the_class_needs(tmp_path: Path) -> None:
    """RoBERTa numbers positions from it, by default 1; a decoder that classifies finds the end of a text by it."""
    folder = save_class(tmp_path / "roberta", "roberta", "RobertaModel")
    config = json.loads((folder / "config.json").read_text())
    del config["pad_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    signature = open_source(folder).signature
    assert (signature.inputs[0].pad, signature.max_sequence) == (1, 38)
    with pytest.raises(CheckpointError, match="pad_token_id: expected a token, after which positions are numbered"):
        open_source(edit_config(folder, pad_token_id=None))
    folder = save_class(tmp_path / "llama", "llama", "LlamaForSequenceClassification")
    with pytest.raises(CheckpointError, match=r"LlamaForSequenceClassification finds the end of a text by it; set it$"):
        open_source(edit_config(folder, pad_token_id=-1))


@pytest.mark.parametrize(
    ("kind", "name", "changes", "problem"),
    [
        ("bert", "BertForQuestionAnswering", {"num_labels": 3}, "num_labels: expected 2 for BertForQuestionAnswering"),
        ("qwen2", "Qwen2ForQuestionAnswering", {"num_labels": 3}, "num_labels: expected 2 for Qwen2ForQuestionAns"),
        ("electra", "ElectraForMultipleChoice", {"summary_type": "mean"}, "summary_type: expected 'first' for Electra"),
        ("vit", "ViTForMaskedImageModeling", {"encoder_stride": 2}, "encoder_stride: expected patch_size, and image_"),
    ],
)
def test_heads_that_cannot_be(tmp_path: Path, kind: str, name: str, changes: dict[str, Any], problem: str) -> None:
    folder = edit_config(save_class(tmp_path / "m", kind, name), **changes)
    with pytest.raises(CheckpointError) as failure:
        open_source(folder)
    assert str(failure.value).startswith(f"{folder / 'config.json'}: {problem}")


def test_a_copy_of_a_tied_weight_that_differs_is_another_model(tmp_path: Path) -> None:
    path = save_class(tmp_path / "m", "bert", "BertForMaskedLM") / "model.safetensors"
    weights = load_file(path)
    table = weights["bert.embeddings.word_embeddings.weight"]
    save_file({**weights, "cls.predictions.decoder.weight": table.clone()}, path, {"format": "pt"})
    load_universal(open_source(path.parent))
    save_file({**weights, "cls.predictions.decoder.weight": table + 1}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has a parameter cls\.predictions\.decoder\.weight \[48, 16\], which"):
        load_universal(open_source(path.parent))


def test_a_parameter_that_stays_narrow_is_refused_where_it_is_loaded(tmp_path: Path) -> None:
    """xIELU makes its parameters in bfloat16; the planner names it before, so the loader is asked directly."""
    folder = save_class(tmp_path / "m", "bert", "BertModel")
    save_class(folder, "bert", "BertModel", hidden_act="xielu")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(
        CheckpointError, match=r"act_fn\.alpha_p of BertModel stays bfloat16; expected a model that can"
    ):
        load_transformers(checkpoint, Loading())


def test_the_command_line_refuses_in_one_line(copy: Callable[[str], Path]) -> None:
    folder = edit_config(copy("bert"), attn_implementation="hub/kernel")
    line = refused(folder, "inspect", folder)
    assert line.startswith(f"{folder / 'config.json'}: attn_implementation: expected eager or sdpa")


def test_nothing_is_fetched_or_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    logging = transformers.utils.logging
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # given back as it was
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert offline_transformers() is transformers
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert logging.get_verbosity() == logging.ERROR
    assert not logging.is_progress_bar_enabled()


def test_a_user_may_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    offline_transformers()
    assert os.environ["HF_HUB_OFFLINE"] == "0"
