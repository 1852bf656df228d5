"""The whole training of tiny models; what is finished is kept."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from nestforge.examples.train.sparse_mixer.recipe import Subject
from nestforge.examples.train.sparse_mixer.runs import Trainer
from nestforge.examples.train.sparse_mixer.training import Training
from nestforge.examples.train.stages import Record
from nestforge.exporters.checkpoints.checkpoint import sha256_of


@dataclass
class Workshop:
    """Trainings into one folder, and the stages that the last one kept."""

    output: Path
    models: dict[str, Subject]
    kept: set[str] = field(default_factory=set)

    def run(self, trainer: Trainer, seeds: int = 1) -> Record:
        self.kept.clear()

        def told(stage: str, *_: int) -> None:
            if stage.endswith(": kept"):
                self.kept.add(stage.removesuffix(": kept"))

        return Training(self.output, self.models, trainer, seeds, 1, told).run()


@pytest.fixture
def workshop(tmp_path: Path, subjects: dict[str, Subject]) -> Workshop:
    return Workshop(tmp_path / "out", subjects)


def test_models_rows_and_records(workshop: Workshop, trainer: Trainer) -> None:
    records = workshop.run(trainer, seeds=2)
    assert list(records) == ["data", "experts", "tokens", "peer", "experts seed 1"]
    assert records == json.loads((workshop.output / "training.json").read_text())
    assert sorted(path.name for path in workshop.output.iterdir()) == [
        *("experts", "peer", "test.npz", "tokens", "training.json", "validation.npz")
    ]
    data = trainer.data()
    with np.load(workshop.output / "test.npz") as test, np.load(workshop.output / "validation.npz") as validation:
        assert sorted(validation) == ["input_ids", "token_type_ids"]
        assert sorted(test) == ["input_ids", "positions", "targets", "token_type_ids"]
        assert (validation["input_ids"] == data.validation.inputs.numpy()).all()
        assert (test["input_ids"] == data.test.inputs.numpy()).all()
        assert (test["positions"] == data.test.positions.numpy()).all()
        assert (test["targets"] == data.test.targets.numpy()).all()
        assert not test["token_type_ids"].any()


def test_what_is_finished_is_kept(workshop: Workshop, trainer: Trainer) -> None:
    first = workshop.run(trainer)
    model = sha256_of(workshop.output / "experts" / "model.safetensors")
    assert workshop.run(trainer, seeds=2) == first | {
        "experts seed 1": workshop.run(trainer, seeds=2)["experts seed 1"]
    }
    assert workshop.kept == {"data", "experts", "tokens", "peer", "experts seed 1"}
    workshop.models["experts"] = replace(workshop.models["experts"], rate=2e-2)
    workshop.run(trainer)
    assert workshop.kept == {"data", "tokens", "peer"}
    assert sha256_of(workshop.output / "experts" / "model.safetensors") != model
