"""The whole training of a tiny task; what is finished is kept, and the figures are those of the runs."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from nestforge.examples.matformer import train as command
from nestforge.examples.matformer.tasks import DigitsTask, LanguageTask, Task
from nestforge.examples.matformer.train import Training, compared
from nestforge.examples.training import Record
from nestforge.exporters.checkpoints.checkpoint import sha256_of


@dataclass
class Workshop:
    """Trainings of one task into one folder, and the stages that the last one kept."""

    output: Path
    kept: set[str] = field(default_factory=set)

    def run(self, task: Task, seeds: int = 2) -> Record:
        self.kept.clear()

        def told(stage: str, *_: int) -> None:
            if stage.endswith(": kept"):
                self.kept.add(stage.removesuffix(": kept"))

        return Training(self.output, task, seeds, 1, told).run()


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path / "out")


RUNS = {f"seed {seed}: {model}" for seed in (0, 1) for model in ("universal", "S", "M", "L", "XL")}


def test_models_held_out_data_and_figures(workshop: Workshop, task: Task) -> None:
    records = workshop.run(task)
    assert sorted(path.name for path in workshop.output.iterdir()) == sorted(
        [task.name, task.held_out_name, "training.json"]
    )
    assert records.keys() == RUNS | {"data", "comparison"}
    assert {f"{task.name} {name}": record for name, record in records.items()} == json.loads(
        (workshop.output / "training.json").read_text()
    )
    for name, level in records["comparison"]["levels"].items():
        nested, alone = (
            [records[f"seed {seed}: {model}"]["levels"][name]["test"]["loss"] for seed in (0, 1)]
            for model in ("universal", name)
        )
        assert level["parameters"] == records[f"seed 0: {name}"]["parameters"]
        assert level["test"]["nested"]["loss"]["mean"] == pytest.approx(sum(nested) / 2)
        assert level["test"]["ratios"] == [mine / theirs for mine, theirs in zip(nested, alone, strict=True)]


def test_a_task_may_be_compared_once_and_publish_what_was_trained_alone(
    workshop: Workshop, language: LanguageTask
) -> None:
    records = workshop.run(replace(language, name="writer", most_seeds=1, published_levels=("S",)), seeds=3)
    names = {path.name for path in workshop.output.iterdir()}
    assert names == {"writer", "writer.txt", "writer-S-alone", "training.json"}
    assert json.loads((workshop.output / "writer-S-alone" / "config.json").read_text())["nested"] is False
    assert not any(name.startswith("seed 1") for name in records)


def test_what_is_finished_is_kept(workshop: Workshop, language: LanguageTask) -> None:
    first = workshop.run(language, seeds=1)
    model = sha256_of(workshop.output / "lm" / "model.safetensors")
    assert workshop.run(language, seeds=1) == first
    assert workshop.kept == {"lm data"} | {f"lm {run}" for run in RUNS if run.startswith("seed 0")}
    more = workshop.run(language, seeds=2)
    assert all(more[name] == first[name] for name in first if name != "comparison")
    other = replace(language, recipe=replace(language.recipe, rate=2e-2))
    workshop.run(other, seeds=1)
    assert workshop.kept == {"lm data"}
    assert sha256_of(workshop.output / "lm" / "model.safetensors") != model


def test_held_out_text_is_of_the_test_part(workshop: Workshop, language: LanguageTask) -> None:
    wide = replace(language, config=replace(language.config, max_position_embeddings=64))
    workshop.run(wide, seeds=1)
    lines = (workshop.output / "lm.txt").read_bytes().splitlines()
    test = wide.data().parts["test"]
    assert lines
    assert all(40 <= len(line) <= 64 and line in test for line in lines)


def test_figures_over_seeds_and_the_bar() -> None:
    nested = [{"loss": loss, "accuracy": 0.5} for loss in (2.0, 4.0)]
    alone = [{"loss": loss, "accuracy": 0.25} for loss in (2.0, 2.0)]
    assert compared(nested, alone) == {
        "nested": {"loss": {"mean": 3.0, "deviation": 2**0.5}, "accuracy": {"mean": 0.5, "deviation": 0.0}},
        "baseline": {"loss": {"mean": 2.0, "deviation": 0.0}, "accuracy": {"mean": 0.25, "deviation": 0.0}},
        "ratio": 1.5,
        "ratios": [1.0, 2.0],
        "holds": False,
    }
    alone = [{"loss": loss, "accuracy": 0.25} for loss in (3.0, 3.0)]
    assert compared(nested, alone)["holds"]
    assert compared(nested[:1], alone[:1])["nested"]["loss"] == {"mean": 2.0, "deviation": None}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, language: LanguageTask, digits: DigitsTask) -> None:
    monkeypatch.setattr(command, "TASKS", (digits, language))
    monkeypatch.setattr(command.os, "cpu_count", lambda: 1)


@pytest.mark.usefixtures("tiny")
def test_the_table_of_both_tasks(tmp_path: Path) -> None:
    result = CliRunner().invoke(command.main, ["--seeds", "2", "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.rpartition(", ")[0] for line in lines if line.startswith(("vit: ", "lm: "))] == [
        "vit: 1,490 parameters",
        "lm: 3,072 parameters",
    ]
    assert [line.split()[0] for line in lines if "±" in line] == ["S", "M", "L", "XL"] * 2
    assert lines[-1] == f"Models, held-out data and training.json lie in {tmp_path / 'out'}"
