from __future__ import annotations

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.ranking import magnitude_scores, rank, taylor_scores


def _batches(count: int = 3) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(4, 60, (4, 12), generator=generator) for _ in range(count)]
    return [(i, torch.ones_like(i), torch.zeros_like(i)) for i in ids]


@pytest.mark.parametrize("method", ["magnitude", "taylor"])
def test_ranking_leaves_the_function_unchanged_and_orders_the_axes(universal, method: str) -> None:
    batch = _batches()[0]
    before = universal.module(*batch)
    scores = magnitude_scores(universal) if method == "magnitude" else taylor_scores(universal, _batches())
    record = rank(universal, scores, method, ["a text"])
    for expected, found in zip(before, universal.module(*batch), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (record.method, record.samples, len(record.order_sha256 or "")) == (method, 1, 64)
    again = magnitude_scores(universal) if method == "magnitude" else taylor_scores(universal, _batches())
    for values in again.values():
        assert (values.diff() <= 1e-5 * values[:-1]).all(), "importance must fall along every axis"


def test_taylor_finds_the_neurons_that_matter(universal) -> None:
    """Neurons whose down column is zero cannot matter, so they must come last."""
    dead = [3, 17, 40]
    universal.module.model.encoder.layer[1].output.dense.weight.data[:, dead] = 0
    scores = taylor_scores(universal, _batches())["layers.1.ffn"]
    assert sorted(torch.argsort(scores)[:3].tolist()) == dead


def test_magnitude_by_hand(universal) -> None:
    attention = universal.module.model.encoder.layer[2].attention
    head = slice(8, 16)
    parts = [getattr(attention.self, name) for name in ("query", "key", "value")]
    expected = sum(part.weight[head].square().sum() + part.bias[head].square().sum() for part in parts)
    expected = expected + attention.output.dense.weight[:, head].square().sum()
    torch.testing.assert_close(magnitude_scores(universal)["layers.2.heads"][1], expected.double())


def test_equal_scores_keep_their_order(universal) -> None:
    before = universal.module.model.encoder.layer[0].intermediate.dense.weight.clone()
    rank(universal, {axis.name: torch.ones(axis.size) for axis in universal.spec.axes}, "magnitude")
    assert torch.equal(universal.module.model.encoder.layer[0].intermediate.dense.weight, before)


def test_scores_that_are_not_finite_are_refused(universal) -> None:
    scores = magnitude_scores(universal)
    scores["layers.1.ffn"][0] = float("nan")
    with pytest.raises(CheckpointError, match=r"layers.1.ffn: importance is not finite"):
        rank(universal, scores, "magnitude")
