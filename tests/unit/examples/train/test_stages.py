"""A stage is done once for its key and its files; what was interrupted leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from nestforge.examples.train.stages import RECORDS_NAME, Stages, replace_file, replace_folder


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    return Stages(tmp_path, lambda *_: None)


def test_a_stage_is_done_once_for_its_key(stages: Stages) -> None:
    done: list[float] = []

    def work() -> dict[str, float]:
        done.append(torch.rand(1).item())
        return {"drawn": done[-1]}

    for key in ({"steps": (1, 2)}, {"steps": (1, 2)}, {"steps": (1, 3)}, {"steps": (1, 3)}):
        stages.run("one", key, [], 7, work)
    assert len(done) == 2
    assert done[0] == done[1]  # the seed is set ahead of each
    record = stages.records()["one"]
    assert record.pop("seconds") >= 0
    assert record == {"drawn": done[1], "made_from": {"steps": [1, 3]}}


def test_a_stage_whose_file_is_gone_is_done_again(stages: Stages, tmp_path: Path) -> None:
    result = tmp_path / "result"

    def work() -> dict[str, str]:
        replace_file(result, b"whole")
        return {}

    stages.run("one", {}, [result], 0, work)
    result.unlink()
    stages.run("one", {}, [result], 0, work)
    assert result.read_bytes() == b"whole"


def test_what_an_interrupted_stage_left_is_removed(stages: Stages, tmp_path: Path) -> None:
    (tmp_path / "model.writing").mkdir()
    (tmp_path / "text.writing").touch()
    stages.run("one", {}, [], 0, dict)
    assert [path.name for path in tmp_path.iterdir()] == [RECORDS_NAME]


def test_records_of_other_stages_stay(stages: Stages, tmp_path: Path) -> None:
    stages.store("one", {"a": 1}, {"loss": 2.0})
    stages.store("two", {}, {"loss": 3.0})
    stages.store("one", {"a": 2}, {"loss": 1.0})
    written = json.loads((tmp_path / RECORDS_NAME).read_text())
    assert written == {"one": {"loss": 1.0, "made_from": {"a": 2}}, "two": {"loss": 3.0, "made_from": {}}}


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()

    def write(folder: Path) -> None:
        assert not (folder / "old").exists()
        folder.mkdir()
        (folder / "new").touch()

    replace_folder(tmp_path / "model", write)
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["model", "model/new"]
