"""The whole training on a tiny checkpoint and invented packages; a finished stage is kept, no other."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.examples.cost_eff import train as command
from nestforge.examples.cost_eff.fit import Stretch
from nestforge.examples.cost_eff.slender import Target
from nestforge.examples.cost_eff.texts import PARTS, Limits, Source
from nestforge.examples.cost_eff.train import Recipe, Training
from nestforge.exporters.checkpoints.checkpoint import sha256_of
from nestforge.exporters.source import open_source
from support.tiny_models import save_tiny_encoder
from support.tokenizer_files import WORDS

RECIPE = Recipe(
    limits=Limits(
        most={"train": 30, "calibration": 6, "test": 6},
        least={"train": 8, "calibration": 1, "test": 1},
        characters=20,
        tokens=30,
        classes=2,
    ),
    seed=0,
    batch=8,
    whole=Stretch(3, 1e-3, 1e-2, dropout=0.1),
    target=Target(heads=2, ffn=24, rank=12),
    cuts=2,
    scoring=1,
    between=Stretch(1, 1e-3, 1e-3),
    recovery=Stretch(2, 1e-3, 1e-3),
)


@dataclass
class Workshop:
    """A training of a tiny checkpoint, and the progress that it told."""

    output: Path
    checkpoint: Path
    packages: tuple[Source, ...]
    told: list[str] = field(default_factory=list)

    def run(self, recipe: Recipe = RECIPE) -> set[str]:
        """Trains, and returns the stages that were kept."""
        self.told.clear()
        training = Training(
            self.output, self.checkpoint, self.packages, recipe, lambda stage, *_: self.told.append(stage)
        )
        self.records = training.run()
        return {stage.removesuffix(": kept") for stage in self.told if stage.endswith(": kept")}

    def hashes(self) -> dict[str, str]:
        files = [path for path in self.output.rglob("*") if path.is_file() and path.name != "training.json"]
        return {path.relative_to(self.output).as_posix(): sha256_of(path) for path in files}


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.syspath_prepend(tmp_path)
    packages = []
    for name, words in (("nf_one", WORDS[:10]), ("nf_two", WORDS[10:])):
        (tmp_path / name).mkdir()
        for module in range(40):
            text = " ".join(words[(module * step + step) % len(words)] for step in range(1, 9))
            source = f'"""The {text} {WORDS[module % 20]} {WORDS[module // 20]}."""\n'
            (tmp_path / name / f"m{module}.py").write_text(source)
        packages.append(Source(name, name, name))
    checkpoint = save_tiny_encoder(tmp_path / "bert")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}))
    return Workshop(tmp_path / "out", checkpoint, tuple(packages))


def test_both_models_their_texts_and_the_record(workshop: Workshop) -> None:
    assert workshop.run() == set()
    assert sorted(path.name for path in workshop.output.iterdir()) == sorted(
        ["whole", "slender", "labels.json", "training.json", *(f"{part}.jsonl" for part in PARTS)]
    )
    assert json.loads((workshop.output / "labels.json").read_text()) == ["nf_one", "nf_two"]
    assert json.loads((workshop.output / "training.json").read_text()) == workshop.records
    for name, heads, ffn in (("whole", 4, 64), ("slender", 2, 24)):
        source = open_source(workshop.output / name)
        submodel = source.spec.universal()
        assert submodel.by_kind()["heads"] == [heads] * 3
        assert submodel.by_kind()["ffn"] == [ffn] * 3
        assert workshop.records[name]["parameters"] == source.parameters(submodel)
        assert [quality["layer"] for quality in workshop.records[name]["test_exits"]] == [1, 2, 3]
    for part, count in workshop.records["data"]["texts"].items():
        lines = [json.loads(line) for line in (workshop.output / f"{part}.jsonl").read_text().splitlines()]
        assert len(lines) == count > 0
        assert all(line.keys() == {"text", "label"} for line in lines)


def test_the_same_run_gives_the_same_files(workshop: Workshop, tmp_path: Path) -> None:
    workshop.run()
    again = replace(workshop, output=tmp_path / "again")
    torch.rand(5)  # whatever was drawn before does not matter
    again.run()
    assert again.hashes() == workshop.hashes()


def test_finished_stages_are_kept(workshop: Workshop) -> None:
    workshop.run()
    before = workshop.hashes()
    (workshop.output / "slender.writing").mkdir()  # as an interrupted run leaves it
    records = json.loads((workshop.output / "training.json").read_text())
    del records["slender"]
    (workshop.output / "training.json").write_text(json.dumps(records))
    assert workshop.run() == {"data", "whole"}
    assert workshop.hashes() == before
    assert workshop.run() == {"data", "whole", "slender"}


def test_another_recipe_repeats_what_depends_on_it(workshop: Workshop) -> None:
    workshop.run()
    before = workshop.hashes()
    assert workshop.run(replace(RECIPE, recovery=Stretch(3, 1e-3, 1e-3))) == {"data", "whole"}
    assert workshop.hashes()["whole/model.safetensors"] == before["whole/model.safetensors"]
    assert workshop.hashes()["slender/model.safetensors"] != before["slender/model.safetensors"]
    assert workshop.run(replace(RECIPE, whole=Stretch(4, 1e-3, 1e-2))) == {"data"}


def test_an_absent_checkpoint_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent() -> Path:
        raise CheckpointError("package x is not installed")

    monkeypatch.setattr(command, "demo_checkpoint", absent)
    with pytest.raises(SystemExit) as stopped:
        command.main(["--output", str(tmp_path / "out")])
    assert stopped.value.code == 1
    assert capsys.readouterr().err == "train: error: package x is not installed\n"
    assert not (tmp_path / "out").exists()
