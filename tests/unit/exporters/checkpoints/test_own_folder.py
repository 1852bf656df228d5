import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import open_checkpoint
from nestforge.exporters.checkpoints.own_folder import (
    OwnConfig,
    config_from_json,
    read_config,
    save_model,
    with_weights,
)
from torch import nn


@dataclass(frozen=True)
class _Width(OwnConfig):
    width: int

    def problem(self) -> str | None:
        return None


def _module(width: int = 3) -> torch.nn.Linear:
    with torch.device("meta"):
        return torch.nn.Linear(width, 2)


def test_a_module_comes_back_in_float32_for_inference(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2).double()
    folder = save_model(module, _Width(3), tmp_path / "deep" / "model", {"a.txt": "a", "b.bin": b"\0"})
    assert json.loads((folder / "config.json").read_text()) == {"width": 3}
    assert ((folder / "a.txt").read_text(), (folder / "b.bin").read_bytes()) == ("a", b"\0")
    checkpoint = open_checkpoint(folder)
    assert {header.dtype for header in checkpoint.tensors.values()} == {"F32"}
    loaded = with_weights(_module, checkpoint)
    assert not loaded.training
    for name, value in loaded.named_parameters():
        assert not value.requires_grad
        assert torch.equal(value, module.get_parameter(name).float())


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (torch.nn.Linear(3, 2, bias=False), "tensor bias is missing from the weights"),
        (torch.nn.Linear(4, 2), r"tensor weight has shape \[2, 4\]; expected \[2, 3\] as config.json says"),
    ],
)
def test_weights_that_are_missing_or_misfit_are_named(tmp_path: Path, saved: torch.nn.Module, message: str) -> None:
    folder = save_model(saved, _Width(3), tmp_path)
    with pytest.raises(CheckpointError, match=f"{message}$"):
        with_weights(_module, open_checkpoint(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    module = torch.nn.Linear(3, 2)
    module.bias.data[1] = value
    save_model(module, _Width(3), tmp_path)
    with pytest.raises(CheckpointError, match=r"^.*: tensor bias holds NaN or infinite values$"):
        with_weights(_module, open_checkpoint(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no such file"):
        with_weights(_module, open_checkpoint(tmp_path, untrained=True))


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
