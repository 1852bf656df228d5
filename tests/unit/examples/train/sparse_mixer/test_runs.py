"""A run publishes what it measured, at every budget."""

from __future__ import annotations

from pathlib import Path

from nestforge.examples.train.sparse_mixer.fit import quality
from nestforge.examples.train.sparse_mixer.recipe import Subject
from nestforge.examples.train.sparse_mixer.runs import Run, Trainer, budgets
from nestforge.exporters.families.sparse_mixer.architecture.config import SparseMixerConfig
from nestforge.exporters.families.sparse_mixer.folder import load_model
from nestforge.exporters.families.sparse_mixer.model.encoder import SparseMixer
from nestforge.exporters.source import open_source

OFFERED = ["100 % of 64 tokens", "50 % of 64 tokens", "100 % of 16 tokens"]


def test_budgets_are_the_capacities_then_the_groups(models: dict[str, SparseMixerConfig]) -> None:
    model = SparseMixer(models["experts"])
    moe = model.layers[1].moe
    seen = [(budget, moe.percent, moe.group_size) for budget in budgets(model)]
    assert seen == list(zip(OFFERED, (100, 50, 100), (64, 64, 16), strict=True))
    assert list(budgets(SparseMixer(models["peer"]))) == ["whole"]


def test_a_run_publishes_what_it_measured(config: SparseMixerConfig, trainer: Trainer, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    record = trainer(Run("model", Subject(config, 1e-2), 0, folder))
    source, model, data = open_source(folder), load_model(folder), trainer.data()
    assert source.signature.text is not None
    assert record["parameters"] == source.parameters(source.spec.universal())
    assert [found["budget"] for found in record["quality"]] == (OFFERED if config.moe_layers else ["whole"])
    for _, found in zip(budgets(model), record["quality"], strict=True):
        assert found["test"] == quality(model, data.test, 4)
        assert found["validation"] == quality(model, data.validation, 4)


def test_seeds_have_names_and_figures_of_their_own(subjects: dict[str, Subject], trainer: Trainer) -> None:
    runs = [Run("experts", subjects["experts"], seed) for seed in (0, 1)]
    assert [run.name for run in runs] == ["experts", "experts seed 1"]
    first, second = (trainer(run)["quality"] for run in runs)
    assert first != second
