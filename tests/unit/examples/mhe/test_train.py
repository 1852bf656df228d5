"""Every attention is trained by the same steps, and what is finished is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from nestforge.examples.mhe import train as command
from nestforge.examples.mhe.fit import KINDS, MODELS, Trainer
from nestforge.exporters.families.mhe.config import MheConfig, MheDecoderConfig
from nestforge.exporters.family import load_model


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch, tiny: Mapping[str, MheConfig], trainer: Trainer) -> None:
    monkeypatch.setattr(command, "MODELS", tiny)
    monkeypatch.setattr(command, "TRAINER", trainer)
    monkeypatch.setattr(command.os, "cpu_count", lambda: 1)


def test_models_and_records(tmp_path: Path, tiny: Mapping[str, MheConfig]) -> None:
    output = tmp_path / "out"
    result = CliRunner().invoke(command.main, ["--output", str(output)])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[1:4]] == list(tiny)
    written = (output / "training.json").read_bytes()
    records = json.loads(written)
    assert set(records) == set(tiny)
    for name, record in records.items():
        model = load_model(output / name)
        assert record["parameters"] == sum(parameter.numel() for parameter in model.parameters())
        assert 0 <= record["accuracy"] <= 1
        assert ("commonest" in record) == name.startswith("encoder")
        assert record["loss"] > 0
    assert CliRunner().invoke(command.main, ["--output", str(output)]).exit_code == 0
    assert (output / "training.json").read_bytes() == written


def test_no_sources_are_one_line(tmp_path: Path, stdlib: Path) -> None:
    for file in stdlib.iterdir():
        file.unlink()
    result = CliRunner().invoke(command.main, ["--output", str(tmp_path / "out")])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("train: error: ")
    assert result.stderr.count("\n") == 1


def test_kinds_differ_in_attention_alone() -> None:
    assert list(MODELS) == [f"{shape}-{kind}" for kind in KINDS for shape in ("encoder", "decoder")]
    for shape in ("encoder", "decoder"):
        found = [dict(MODELS[f"{shape}-{kind}"].to_json(), attention=None, factors=None) for kind in KINDS]
        assert all(one == found[0] for one in found)
    assert isinstance(MODELS["decoder-mha"], MheDecoderConfig)
