"""A saved model goes through the family that compiles it and answers as the trained module does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nestforge.examples.train.exits.batches import Batch
from nestforge.examples.train.exits.folder import load_model, save_model
from nestforge.examples.train.exits.losses import forward
from nestforge.examples.train.exits.slender import slender
from nestforge.examples.train.optimiser import parameters_of
from nestforge.exporters.families.cost_eff.model import CostEffModel
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "given.json"
    path.write_text("{}")
    return path


def thin_of(model: CostEffModel) -> CostEffModel:
    heads = [torch.tensor(ids) for ids in ([0, 3], [1], [0, 1, 2])]
    return slender(model, heads, [torch.arange(size) for size in (5, 12, 7)], rank=6)


@pytest.mark.parametrize("slim", [False, True], ids=["whole", "slender"])
def test_the_family_answers_as_the_trained_model(
    model: CostEffModel, batch: Batch, tokenizer: Path, tmp_path: Path, slim: bool
) -> None:
    trained = thin_of(model) if slim else model
    save_model(trained, tokenizer, tmp_path / "model")
    source = open_source(tmp_path / "model")
    universal = load_universal(source)
    (loaded,) = [part for part in universal.module.modules() if isinstance(part, CostEffModel)]
    with torch.no_grad():
        expected, found = forward(trained, batch), forward(loaded, batch)
        answer = universal.module(batch.input_ids, batch.attention_mask, torch.zeros_like(batch.input_ids))
    assert torch.equal(torch.stack(found.states), torch.stack(expected.states))
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    torch.testing.assert_close(answer[-2], expected.logits[-1])
    assert source.parameters(source.spec.universal()) == parameters_of(trained)
    assert source.signature.text is not None


def test_what_was_saved_trains_on(model: CostEffModel, batch: Batch, tokenizer: Path, tmp_path: Path) -> None:
    save_model(thin_of(model), tokenizer, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert [(w.heads, w.ffn) for w in loaded.architecture.layers] == [(2, 5), (1, 12), (3, 7)]
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert torch.equal(forward(loaded, batch).logits[2], forward(thin_of(model), batch).logits[2])
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"
