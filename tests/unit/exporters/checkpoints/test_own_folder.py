from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import open_checkpoint
from nestforge.exporters.checkpoints.own_config import OwnConfig
from nestforge.exporters.checkpoints.own_folder import save_model, with_weights


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
