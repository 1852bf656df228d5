"""The encoder comes from the checkpoint as it stands; the exits are new."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.examples.train.exits.multi_exit import multi_exit_model
from nestforge.exporters.checkpoints.checkpoint import open_checkpoint
from support.tiny_models import save_tiny_encoder

INPUTS = torch.tensor([[2, 7, 9, 3], [2, 5, 3, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = save_tiny_encoder(tmp_path / "bert")
    set_field(folder, "pad_token_id", 0)
    return folder


def set_field(folder: Path, key: str, value: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_states_are_those_of_the_checkpoint(folder: Path) -> None:
    from transformers import AutoModel

    model = multi_exit_model(open_checkpoint(folder), classes=5)
    with torch.no_grad():
        states = model.hidden_states(*INPUTS)
        expected = AutoModel.from_pretrained(folder)(*INPUTS, output_hidden_states=True).hidden_states
    real = INPUTS[1].bool()
    assert len(states) == len(expected) == 4
    for found, wanted in zip(states, expected, strict=True):
        torch.testing.assert_close(found[real], wanted[real], rtol=1e-4, atol=1e-5)


def test_exits_after_every_layer_over_the_mean(folder: Path) -> None:
    torch.manual_seed(3)
    model = multi_exit_model(open_checkpoint(folder), classes=5)
    assert model.architecture.exits.layers == (1, 2, 3)
    assert (model.architecture.exits.pool, model.architecture.exits.activation) == ("mean", "tanh")
    weights = torch.stack([head.weight for head in model.exits.values()])
    assert weights.shape == (3, 5, 32)
    assert 0.01 < weights.std() < 0.03
    assert not any(head.bias.any() for head in model.exits.values())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "roberta", "expected model_type bert, got 'roberta'"),
        ("pad_token_id", None, "config.json: pad_token_id is missing"),
        ("vocab_size", 65, r"tensor embeddings.word_embeddings.weight: expected \(65, 32\), got \(64, 32\)"),
        ("num_hidden_layers", 2, r"tensor encoder.layer.2.attention.output.LayerNorm.bias: expected None, got \(32,\)"),
    ],
)
def test_what_is_no_such_encoder_is_refused(folder: Path, key: str, value: object, message: str) -> None:
    set_field(folder, key, value)
    with pytest.raises(CheckpointError, match=message):
        multi_exit_model(open_checkpoint(folder), classes=5)
