"""A dataclass as config.json: read strictly, written as it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import open_checkpoint
from nestforge.exporters.checkpoints.own_config import OwnConfig, config_from_json, read_config
from nestforge.exporters.checkpoints.own_folder import save_model
from torch import nn


@dataclass(frozen=True, kw_only=True)
class PairConfig(OwnConfig):
    small: int = field(metadata={"min": 1})
    large: int
    names: tuple[str, ...] = ()

    def problem(self) -> str | None:
        return None if self.small <= self.large else f"small: {self.small} is above large {self.large}"


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    config = PairConfig(small=1, large=2, names=("a",))
    assert config.to_json() == {"small": 1, "large": 2, "names": ["a"]}
    folder = save_model(nn.Linear(1, 1), config, tmp_path / "model")
    assert read_config(open_checkpoint(folder), PairConfig) == config


def test_what_tools_say_beside_is_read_over() -> None:
    data = {"small": 1, "large": 2, "architectures": ["Pair"], "_name_or_path": "here"}
    assert config_from_json(PairConfig, data, "here") == PairConfig(small=1, large=2)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.update(smal=1), "config.json: unknown key 'smal'; did you mean 'small'?"),
        (lambda data: data.pop("large"), "config.json: missing key 'large'"),
        (lambda data: data.update(small=0), "config.json: small: expected at least 1, got 0"),
        (lambda data: data.update(small=3), "config.json: small: 3 is above large 2"),
    ],
)
def test_what_makes_no_model_is_refused(edit: Callable[[dict[str, Any]], object], message: str) -> None:
    data: dict[str, Any] = json.loads('{"small": 1, "large": 2}')
    edit(data)
    with pytest.raises(CheckpointError) as refused:
        config_from_json(PairConfig, data, "config.json")
    assert str(refused.value) == message
