"""Tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.errors import CheckpointError, ExportError, PlanError
from nestforge.exporters.families.coda.model import load_model
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from safetensors.torch import load_file, save_file
from support.tiny_coda import coda_config, save_tiny_coda, tiny_coda


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_coda(tmp_path_factory.mktemp("coda") / "m")


def test_what_it_takes_and_returns(folder: Path) -> None:
    signature = open_source(folder).signature
    assert [spec.name for spec in signature.inputs] == ["input_ids", "attention_mask"]
    assert [(spec.name, spec.dims) for spec in signature.outputs] == [("last_hidden_state", ("batch", "sequence", 32))]
    assert (signature.mask, signature.max_sequence) == ("attention_mask", 24)


def test_ranges_are_refused_with_the_reason(folder: Path) -> None:
    signature = open_source(folder).signature
    problem = r"^bucket 1x1\.\.8: k, the tokens that its layers select, is one number for each length; ask for static b"
    with pytest.raises(ExportError, match=problem):
        signature.buckets([Bucket(1, 8, None, 1)], ())
    assert all(bucket.is_static for bucket in signature.buckets(None, [Bucket(1, 24, None, 1)]))


def test_narrowing_cuts_neurons_and_sets_the_reduction(folder: Path) -> None:
    universal = load_universal(open_source(folder))
    assert universal.module.model.reduction == 1
    narrowed = universal.narrow(universal.spec.parse("ffn24-coda.reduction4"))
    assert narrowed.model.reduction == 4
    assert narrowed.model.layers[1].ffn.up.weight.shape == (24, 32)
    assert narrowed.model.layers[1].router.weight.shape == (32,)
    assert universal.module.model.reduction == 1


def test_a_model_of_its_own_folder_has_the_trained_reduction(tmp_path: Path) -> None:
    save_tiny_coda(tmp_path, reduction=2, reductions=(2, 1))
    model, expected = load_model(tmp_path), tiny_coda(coda_config(reduction=2, reductions=(2, 1)))
    assert model.reduction == 2
    ids = torch.randint(0, 40, (2, 8))
    assert torch.equal(model(ids, torch.ones_like(ids)), expected(ids, torch.ones_like(ids)))


@pytest.mark.parametrize(
    ("id_", "problem"),
    [
        ("coda.reduction0", "axis coda.reduction: expected one of 4, 1, got 0"),
        ("coda.reduction3", "axis coda.reduction: expected one of 4, 1, got 3"),
        ("coda.reduction25", "axis coda.reduction: expected one of 4, 1, got 25"),
    ],
)
def test_reductions_that_are_not_offered_are_refused(folder: Path, id_: str, problem: str) -> None:
    with pytest.raises(PlanError, match=f"^{problem}$"):
        open_source(folder).spec.parse(id_)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"layers.1.router.weight": torch.zeros(24)},
            r"tensor layers.1.router.weight has shape \[24\]; expected \[32\]",
        ),
        ({"layers.1.router.weight": None}, r"tensor layers.1.router.weight is missing"),
        ({"layers.1.conv.weight": torch.zeros(32, 3)}, r"tensor 'layers.1.conv.weight' has no place in the model"),
    ],
    ids=["router of another width", "no router", "a convolution"],
)
def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path, change: Any, problem: str) -> None:
    """A convolution, which needs its neighbours, has no place in a layer that selects tokens."""
    weights = {**load_file(folder / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=problem) as error:
        open_source(tmp_path)
    assert "\n" not in str(error.value)


TOKENS, K = 16, 6
