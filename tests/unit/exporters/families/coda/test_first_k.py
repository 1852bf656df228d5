"""Engines of a model whose layers compute the first k tokens, against its formulas written again in numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import nestforge
import numpy as np
import numpy.typing as npt
import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from safetensors.numpy import load_file
from support.tiny_coda import save_tiny_coda
from support.tiny_compile import board

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_coda(tmp_path_factory.mktemp("first_k"), **SETTINGS, reduction=3, reductions=(3, 1))


def test_padding_in_front_is_not_taken_for_the_first_tokens(folder: Path, tmp_path: Path) -> None:
    profile = board(budgets={"full": {}}, buckets=[f"3x{TOKENS}"])
    path = compile_bundle(folder, profile, tmp_path / "b")
    (engine,) = [engine for engine in open_bundle(path).manifest.engines if "reduction3" in engine.submodel]
    assert (engine.metadata or {})["tokens selected"] == K
    assert (engine.emitted, engine.slice_problem) == ("sliced", None)
    weights = {name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()}
    ids = np.random.default_rng(0).integers(0, 40, (3, TOKENS))
    mask = np.ones((3, TOKENS), np.int64)
    mask[0, :6], mask[1, 9:], mask[2, [1, 2, 5, 7, *range(9, 16)]] = 0, 0, 0  # in front, behind, within: 5 tokens
    with nestforge.load(path) as model:
        (found,) = model({"input_ids": ids, "attention_mask": mask}, submodel=engine.submodel).outputs.values()
    for row in range(3):
        np.testing.assert_allclose(found[row], expected(weights, ids[row], mask[row]), rtol=0, atol=2e-5)
