"""The whole training of tiny models; what is finished is kept."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from nestforge.examples.sparse_mixer import train as command
from nestforge.examples.sparse_mixer.fit import Subject, Trainer
from nestforge.examples.sparse_mixer.train import Training
from nestforge.examples.training import Record
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


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch, subjects: dict[str, Subject], trainer: Trainer) -> None:
    monkeypatch.setattr(command, "MODELS", subjects)
    monkeypatch.setattr(command, "TRAINER", trainer)
    monkeypatch.setattr(command.os, "cpu_count", lambda: 1)


@pytest.mark.usefixtures("_tiny")
def test_the_table_of_all_models_and_budgets(tmp_path: Path) -> None:
    result = CliRunner().invoke(command.main, ["--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("8 test rows; the commonest byte: ")
    assert [line.partition(":")[0] for line in lines if " parameters, trained in " in line] == [
        *("experts", "tokens", "peer", "experts seed 1")
    ]
    assert sum("% of 64 tokens" in line for line in lines) == 6
    assert sum(line.endswith(" -") for line in lines) == 1  # the peer drops no tokens
    assert lines[-1] == f"Models, held-out rows and training.json lie in {tmp_path / 'out'}"
