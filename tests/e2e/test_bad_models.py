"""Model folders that cannot be compiled: one clear line that says where and what, and nothing written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from nestforge.errors import CheckpointError, NestforgeError, UnsupportedModelError
from nestforge.tools.cli import main
from support.refused_compile import Case

FFN = "encoder.layer.0.output.dense.weight"


def truncate(case: Case, keep: float) -> None:
    path = case.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def pickle(case: Case) -> None:
    (case.model / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, case.model / "pytorch_model.bin")


def index(case: Case, content: Any) -> None:
    (case.model / "model.safetensors").unlink()
    (case.model / "model.safetensors.index.json").write_text(json.dumps(content))


def plain(case: Case) -> None:
    """Without the modules of sentence-transformers, which loads the base model whatever class is named."""
    (case.model / "modules.json").unlink(missing_ok=True)
    shutil.rmtree(case.model / "1_Pooling", ignore_errors=True)


MODELS: dict[str, tuple[Callable[[Case], object], type[NestforgeError], str]] = {
    "no folder": (
        lambda c: shutil.rmtree(c.model),
        CheckpointError,
        r"model: no such folder; expected config.json and",
    ),
    "no config": (lambda c: (c.model / "config.json").unlink(), CheckpointError, r"config.json: no such file"),
    "config is no JSON": (
        lambda c: (c.model / "config.json").write_text("{'a': 1}"),
        CheckpointError,
        r"config.json: not JSON \(",
    ),
    "no weights": (
        lambda c: (c.model / "model.safetensors").unlink(),
        CheckpointError,
        r"model.safetensors: no such file; expected it or model.safetensors.index.json",
    ),
    "empty weights": (lambda c: truncate(c, 0), CheckpointError, r"model.safetensors: not a whole safetensors file"),
    "half a header": (lambda c: truncate(c, 0.01), CheckpointError, r"not a whole safetensors file .*; fetch it again"),
    "truncated": (lambda c: truncate(c, 0.9), CheckpointError, r"not a whole safetensors file .*; fetch it again"),
    "pickle": (
        pickle,
        CheckpointError,
        r"pytorch_model.bin: pickled weights are refused .* convert once .*save_pretrained",
    ),
    "index without shards": (
        lambda c: index(c, {"weight_map": {}}),
        CheckpointError,
        r"expected a weight_map of tensor",
    ),
    "shard outside": (
        lambda c: index(c, {"weight_map": {"a": "../../secret.safetensors"}}),
        CheckpointError,
        r"shard '../../secret.safetensors' leaves the model folder",
    ),
    "shard missing": (
        lambda c: index(c, {"weight_map": {"a": "model-1.safetensors"}}),
        CheckpointError,
        r"model-1.safetensors: no such file; model.safetensors.index.json lists it",
    ),
    "wrong shape on an axis": (
        lambda c: c.weights(lambda w: w.update({FFN: np.zeros((16, 24), np.float32)})),
        CheckpointError,
        rf"tensor {FFN} has shape \[16, 24\]; expected \[16, 32\] as config.json says",
    ),
    "wrong rank on an axis": (
        lambda c: c.weights(lambda w: w.update({FFN: np.zeros(16, np.float32)})),
        CheckpointError,
        rf"tensor {FFN} has shape \[16\]; expected \[16, 32\] as config.json says",
    ),
    "a number for a matrix": (
        lambda c: c.weights(lambda w: w.update({FFN: np.array(1.0, np.float32)})),
        CheckpointError,
        rf"tensor {FFN} has shape \[\]; expected \[16, 32\] as config.json says",
    ),
    "wrong shape elsewhere": (
        lambda c: c.weights(lambda w: w.update({"embeddings.LayerNorm.bias": np.zeros(9, np.float32)})),
        CheckpointError,
        r"tensor embeddings.LayerNorm.bias has shape \[9\]; expected \[16\] as config.json says",
    ),
    "a tensor missing on an axis": (
        lambda c: c.weights(lambda w: w.pop(FFN)),
        CheckpointError,
        rf"tensor {FFN} is missing from the weights",
    ),
    "a tensor missing elsewhere": (
        lambda c: c.weights(lambda w: w.pop("embeddings.LayerNorm.bias")),
        CheckpointError,
        r"tensor embeddings.LayerNorm.bias is missing from the weights",
    ),
    "NaN": (
        lambda c: c.weights(lambda w: w[FFN].__setitem__((3, 5), np.nan)),
        CheckpointError,
        rf"tensor {FFN} holds NaN or infinite values",
    ),
    "infinity": (
        lambda c: c.weights(lambda w: w["pooler.dense.bias"].__setitem__(0, -np.inf)),
        CheckpointError,
        r"tensor pooler.dense.bias holds NaN or infinite values",
    ),
    "unknown model_type": (
        lambda c: c.config(model_type="mamba"),
        UnsupportedModelError,
        r"config.json: model_type 'mamba' is not supported; supported are .*bert, roberta.*; docs/writing-a-family.md",
    ),
    "no model_type": (
        lambda c: c.config(model_type=...),
        UnsupportedModelError,
        r"model_type None is not supported; supported are",
    ),
    "unknown class": (
        lambda c: (plain(c), c.config(architectures=["BertForPretending"])),
        CheckpointError,
        r"architecture 'BertForPretending' is not supported; supported are BertModel, BertForSequenceClassification, ",
    ),
    "architectures is a number": (
        lambda c: (plain(c), c.config(architectures=5)),
        CheckpointError,
        r"architecture '5' is not",
    ),
    "layers do not fit": (
        lambda c: c.config(num_hidden_layers=3),
        CheckpointError,
        r"tensor encoder.layer.2.attention.self.query.weight is missing from the weights",
    ),
    "heads do not divide": (
        lambda c: c.config(num_attention_heads=3),
        CheckpointError,
        r"config.json: num_attention_heads: 16 features cannot be split into 3 heads",
    ),
    "no heads": (
        lambda c: c.config(num_attention_heads=0),
        CheckpointError,
        r"config.json: num_attention_heads: expected a whole number of at least 1, got 0",
    ),
    "hidden_size missing": (
        lambda c: c.config(hidden_size=...),
        CheckpointError,
        r"config.json: hidden_size: expected a whole number of at least 1, got None",
    ),
    "hidden_size is text": (
        lambda c: c.config(hidden_size="16"),
        CheckpointError,
        r"hidden_size: expected .* got '16'",
    ),
    "positions are a list": (
        lambda c: c.config(max_position_embeddings=[40]),
        CheckpointError,
        r"max_position_embeddings: expected a whole number of at least 1, got \[40\]",
    ),
    "unknown activation": (
        lambda c: c.config(hidden_act="swoosh"),
        CheckpointError,
        r"model: transformers cannot load it \(KeyError: 'swoosh'\)",
    ),
    "a type that transformers refuses": (
        lambda c: c.config(layer_norm_eps="small"),
        CheckpointError,
        r"transformers cannot load it \(.*layer_norm_eps.*expected float, got str",
    ),
}


@pytest.mark.parametrize(("damage", "error", "message"), MODELS.values(), ids=MODELS)
def test_models(case: Case, damage: Callable[[Case], object], error: type[NestforgeError], message: str) -> None:
    damage(case)
    refusal = case.refused()
    assert type(refusal) is error
    assert re.search(message, str(refusal)), str(refusal)


def test_the_command_line_prints_one_line_and_exits_with_1(case: Case) -> None:
    truncate(case, 0.5)
    case.yaml()
    result = CliRunner().invoke(
        main, ["compile", str(case.model), "--profile", case.profile, "--output", str(case.output)]
    )
    assert result.exit_code == 1
    assert result.stdout == ""
    assert re.fullmatch(r"nestforge: error: .*model.safetensors: not a whole safetensors file .*\n", result.stderr)
    assert list(case.output.parent.iterdir()) == []
