from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from nestforge.examples.mhe.fit import Trainer, answers, fit, quality
from nestforge.exporters.families.mhe.config import MheConfig
from nestforge.exporters.families.mhe.model import made
from torch.nn import functional


def _model(config: MheConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return made(config)


@pytest.mark.parametrize("name", ["encoder-mhe_mul", "decoder-mhe_add"])
def test_training_lowers_the_loss_and_moves_head_embeddings(
    name: str, tiny: Mapping[str, MheConfig], trainer: Trainer
) -> None:
    model, data = _model(tiny[name]), trainer.data(tiny[name])
    (batch,) = data.batches(4, 1, seed=3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    worse = quality(model, [batch])["loss"]
    fit(model, [batch] * trainer.recipe.steps, trainer.recipe, trainer.recipe.encoder_rate)
    assert quality(model, [batch])["loss"] < worse
    queries = "layers.0.attention.embedding.query"
    assert not model.state_dict()[queries].equal(before[queries])


def test_quality_is_of_what_is_asked_for(tiny: Mapping[str, MheConfig], trainer: Trainer) -> None:
    config = tiny["encoder-mha"]
    model, rows = _model(config), trainer.data(config).test
    found = quality(model, [rows])
    logits = answers(model, rows).detach()
    assert logits.shape == (*rows.targets.shape, config.vocab_size)
    everywhere = model(rows.inputs, torch.ones_like(rows.inputs))
    assert logits[2, 1].equal(everywhere[2, rows.positions[2, 1]])
    expected = functional.cross_entropy(logits.flatten(0, 1), rows.targets.flatten()).item()
    assert found["loss"] == pytest.approx(expected)
    assert found["accuracy"] == (logits.argmax(-1) == rows.targets).double().mean()
