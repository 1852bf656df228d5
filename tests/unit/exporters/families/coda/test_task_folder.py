"""A task may be offered at fewer reductions than its base, whatever the base states of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import open_checkpoint
from nestforge.exporters.checkpoints.own_folder import read_config
from nestforge.exporters.families.coda.config import CodaConfig
from nestforge.exporters.families.coda.tasks import read_task
from support.coda_tasks import SETTINGS, save_tiny_task
from support.tiny_coda import save_tiny_coda


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that is dense at r = 1 and states a k for r = 4, and a task on it."""
    folder = tmp_path_factory.mktemp("tasks")
    own = {"reductions": (4, 2, 1), "reduction": 2, "reduction_of_one": "dense", "tokens_selected": {"8": {"4": 1}}}
    save_tiny_coda(folder / "base", **SETTINGS, **own)
    save_tiny_task(folder / "base", folder / "task", 1)
    return folder


def read(folder: Path, tmp_path: Path, **changes: Any) -> dict[str, tuple[int, ...]]:
    stated = json.loads((folder / "task" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stated, **changes}))
    (tmp_path / "model.safetensors").write_bytes((folder / "task" / "model.safetensors").read_bytes())
    base = read_config(open_checkpoint(folder / "base"), CodaConfig)
    return dict(read_task(base, tmp_path).choices)


@pytest.mark.parametrize(
    ("reductions", "expected"), [([4, 2, 1], (4, 2, 1)), ([4, 2], (4, 2)), ([2, 1], (2, 1)), (None, (4, 2))]
)
def test_a_task_is_offered_at_some_of_the_base_s(
    folder: Path, tmp_path: Path, reductions: list[int] | None, expected: tuple[int, ...]
) -> None:
    assert read(folder, tmp_path, reductions=reductions) == {"coda.reduction": expected}


def test_reductions_without_that_of_training_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: reductions: \[4, 1\] lack 2, the reduction of training"):
        read(folder, tmp_path, reductions=[4, 1])
