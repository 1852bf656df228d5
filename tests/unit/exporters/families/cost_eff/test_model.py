"""The mathematics of the reference model: pooling, exits, entropy, truncated SVD."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from nestforge.errors import CheckpointError
from nestforge.exporters.families.cost_eff.loading import factorise
from nestforge.exporters.families.cost_eff.model import entropy
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.cost_eff_models import save_tiny

IDS = torch.randint(4, 60, (2, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])


@pytest.mark.parametrize("pool", ["cls", "mean", "mean_with_padding"])
@pytest.mark.parametrize("activation", ["tanh", "none"])
def test_exits_by_hand(tmp_path: Path, pool: str, activation: str) -> None:
    folder = save_tiny(tmp_path / "m", sidecar={"exits.pool": pool, "exits.activation": activation})
    model = load_universal(open_source(folder)).module.model
    states = [state.numpy().astype(np.float64) for state in model.hidden_states(IDS, MASK)]
    weights = {name: data.numpy() for name, data in model.named_parameters()}
    mask = MASK.numpy()[:, :, None]
    for layer in (1, 3, 4):
        hidden = states[layer]
        pooled = {
            "cls": hidden[:, 0],
            "mean": (hidden * mask).sum(1) / mask.sum(1),
            "mean_with_padding": hidden.mean(1),
        }[pool]
        z = (np.tanh(pooled) if activation == "tanh" else pooled) @ weights[f"exits.{layer}.weight"].T
        z += weights[f"exits.{layer}.bias"]
        p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
        logits, found = model.answer(layer, model.hidden_states(IDS, MASK)[layer], MASK)
        np.testing.assert_allclose(logits, z, atol=1e-5)
        np.testing.assert_allclose(found, -(p * np.log(p)).sum(-1), atol=1e-5)
    torch.testing.assert_close(model(IDS, MASK), (logits, found))


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_padding_does_not_change_an_answer(tmp_path: Path, pool: str) -> None:
    model = load_universal(open_source(save_tiny(tmp_path / "m", sidecar={"exits.pool": pool}))).module.model
    padded, alone = model(IDS, MASK), model(IDS[1:, :4], MASK[1:, :4])
    for together, expected in zip(padded, alone, strict=True):
        torch.testing.assert_close(together[1:], expected, atol=1e-5, rtol=1e-5)


def test_a_row_without_real_tokens_is_finite(tmp_path: Path) -> None:
    model = load_universal(open_source(save_tiny(tmp_path / "m", sidecar={"exits.pool": "mean"}))).module.model
    assert all(torch.isfinite(output).all() for output in model(IDS, MASK * 0))


@pytest.mark.parametrize("gap", [0.0, 1.0, 17.0, 18.0, 90.0, 1e4, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_entropy_of_a_gap(gap: float, dtype: torch.dtype) -> None:
    gap = min(gap, torch.finfo(dtype).max)
    found = entropy(torch.tensor([[gap, 0.0]], dtype=dtype))
    q = math.exp(-gap)
    exact = math.log1p(q) + gap * q / (1 + q)  # of a gap g between two classes: ln(1 + e^-g) + g e^-g / (1 + e^-g)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(exact, rel=1e-3 if dtype == torch.float16 else 1e-5, abs=1e-7)


@given(arrays(np.float32, (3, 5), elements=st.floats(-(2.0**120), 2.0**120, width=32)))
def test_entropy_is_a_number_between_none_and_uniform(logits: np.ndarray) -> None:
    found = entropy(torch.from_numpy(logits))
    assert ((found >= 0) & (found <= math.log(5) + 1e-6)).all()


@given(arrays(np.float32, (2, 4), elements=st.floats(-20, 20, width=32)), st.floats(-50, 50))
def test_entropy_does_not_see_a_common_shift(logits: np.ndarray, shift: float) -> None:
    moved = entropy(torch.from_numpy(logits) + shift)
    torch.testing.assert_close(moved, entropy(torch.from_numpy(logits)), atol=1e-4, rtol=1e-3)


def test_factors_are_the_best_of_their_rank_and_a_prefix_of_all() -> None:
    table = torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
    w1, w2 = factorise(table, 5)
    values = torch.linalg.svdvals(table)
    assert torch.dist(w1 @ w2, table).item() == pytest.approx(values[5:].square().sum().sqrt().item(), rel=1e-5)
    torch.testing.assert_close(w1.norm(dim=0), values[:5])  # W1 = U_R S_R
    torch.testing.assert_close(w2 @ w2.T, torch.eye(5))  # W2 = V_R^T
    whole = factorise(table, 12)
    torch.testing.assert_close((w1, w2), (whole[0][:, :5], whole[1][:5]))


def test_a_factorised_lookup_equals_rows_of_the_product(tmp_path: Path) -> None:
    table = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    w1, w2 = factorise(table, 16)
    embeddings = load_universal(open_source(save_tiny(tmp_path / "m"))).module.model.embeddings
    embeddings.word_embeddings.weight.data, embeddings.word_projection.weight.data = w1, w2.T.contiguous()
    factorised = embeddings(IDS, None)
    embeddings.word_embeddings.weight.data, embeddings.word_projection = w1 @ w2, None
    torch.testing.assert_close(factorised, embeddings(IDS, None), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rank", [0, 13])
def test_a_rank_that_no_table_has(rank: int) -> None:
    with pytest.raises(CheckpointError, match=rf"embedding \[50, 12\]: expected a rank of 1\.\.12, got {rank}"):
        factorise(torch.zeros(50, 12), rank)
