"""Engines of a model whose layers compute the first k tokens, against its formulas written again in numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import numpy.typing as npt
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import CheckpointError, ExportError, PlanError
from nestforge.exporters.families.coda.model import load_model
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, save_file
from support.tiny_coda import coda_config, save_tiny_coda, tiny_coda
from support.tiny_compile import board


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


Floats = npt.NDArray[np.float64]
TOKENS, K = 16, 6
SETTINGS = {"position": "learned", "num_hidden_layers": 1, "norm": "layer", "bias": True, "router": "first_k"}


def normed(x: Floats, weights: Mapping[str, Floats], name: str) -> Floats:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x: Floats, weights: Mapping[str, Floats], name: str) -> Floats:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def expected(weights: Mapping[str, Floats], ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> Floats:
    """Last states of one row ``[n]``: a layer of 4 heads of 8, whose tokens read all tokens of the row."""
    x = weights["embeddings.word.weight"][ids] + weights["embeddings.position.weight"][: len(ids)]
    at = "layers.0"
    read = normed(x, weights, f"{at}.attention_norm")
    chosen = np.flatnonzero(mask)[:K]  # what is no padding comes first
    query, key, value = (linear(read, weights, f"{at}.attention.{part}") for part in ("query", "key", "value"))
    heads = []
    for head in range(4):
        own = slice(8 * head, 8 * head + 8)
        scores = query[chosen][:, own] @ key[:, own].T / math.sqrt(8)
        shares = np.exp(scores - scores.max(-1, keepdims=True)) * mask
        heads.append(shares / shares.sum(-1, keepdims=True) @ value[:, own])
    attended = linear(np.concatenate(heads, -1), weights, f"{at}.attention.output")
    inner = np.maximum(linear(normed(x[chosen] + attended, weights, f"{at}.ffn_norm"), weights, f"{at}.ffn.up"), 0)
    y = x + linear(np.maximum(linear(read, weights, f"{at}.adapter.down"), 0), weights, f"{at}.adapter.up")
    y[chosen] += attended + linear(inner, weights, f"{at}.ffn.down")
    return normed(y, weights, "norm")


@pytest.fixture(scope="module")
def first_k_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_coda(tmp_path_factory.mktemp("first_k"), **SETTINGS, reduction=3, reductions=(3, 1))


def test_padding_in_front_is_not_taken_for_the_first_tokens(first_k_folder: Path, tmp_path: Path) -> None:
    profile = board(budgets={"full": {}}, buckets=[f"3x{TOKENS}"])
    path = compile_bundle(first_k_folder, profile, tmp_path / "b")
    (engine,) = [engine for engine in open_bundle(path).manifest.engines if "reduction3" in engine.submodel]
    assert (engine.metadata or {})["tokens selected"] == K
    assert (engine.emitted, engine.slice_problem) == ("sliced", None)
    weights = {
        name: tensor.astype(np.float64) for name, tensor in load_numpy(first_k_folder / "model.safetensors").items()
    }
    ids = np.random.default_rng(0).integers(0, 40, (3, TOKENS))
    mask = np.ones((3, TOKENS), np.int64)
    mask[0, :6], mask[1, 9:], mask[2, [1, 2, 5, 7, *range(9, 16)]] = 0, 0, 0  # in front, behind, within: 5 tokens
    with nestforge.load(path) as model:
        (found,) = model({"input_ids": ids, "attention_mask": mask}, submodel=engine.submodel).outputs.values()
    for row in range(3):
        np.testing.assert_allclose(found[row], expected(weights, ids[row], mask[row]), rtol=0, atol=2e-5)
