from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nestforge.compiler.nest.agreement import embeddings, mean_cosines
from nestforge.compiler.nest.texts import TextBatches
from nestforge.compiler.work.clock import Clock, silent
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.tiny_models import save_tiny_encoder

from .conftest import Ordinary


def test_a_level_that_changed_agrees_less_and_the_whole_entirely(ordinary: Ordinary) -> None:
    universal = ordinary.universal
    texts = TextBatches.of(universal.source, ordinary.corpus.held_out)
    reference = embeddings(universal.source, universal.module, texts)
    assert reference.shape == (len(ordinary.corpus.held_out), 32)
    submodels = [universal.spec.parse("ffn8-heads4"), universal.spec.universal()]
    half, whole = mean_cosines(universal, submodels, texts, reference, Clock(silent))
    assert whole == pytest.approx(1, abs=1e-6)
    assert half < 0.99


def test_without_an_embedding_tokens_are_averaged_where_they_are_real(tmp_path: Path) -> None:
    universal = load_universal(open_source(save_tiny_encoder(tmp_path / "plain")))
    together = TextBatches.of(universal.source, ["the fox", "the quick brown fox jumps"])
    found = embeddings(universal.source, universal.module, together)
    for row, text in enumerate(together.texts):
        alone = TextBatches.of(universal.source, [text])
        (batch,) = alone.once(1)
        with torch.no_grad():
            expected = universal.module(*batch.inputs)[0][0].double().mean(0)
        assert torch.allclose(found[row], expected, atol=1e-6)


def test_a_classifier_is_compared_by_its_logits(tmp_path: Path) -> None:
    folder = save_tiny_encoder(tmp_path / "classifier", task="ForSequenceClassification", num_labels=3)
    universal = load_universal(open_source(folder))
    found = embeddings(universal.source, universal.module, TextBatches.of(universal.source, ["the fox", "a dog"]))
    assert found.shape == (2, 3)
