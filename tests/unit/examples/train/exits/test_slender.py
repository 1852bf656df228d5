"""Slicing keeps the function where nothing is lost; the schedule has the published numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nestforge.examples.train.exits.batches import Batch
from nestforge.examples.train.exits.importance import Importance
from nestforge.examples.train.exits.losses import forward
from nestforge.examples.train.exits.slender import Target, most_important, schedule, slender, word_embedding
from nestforge.exporters.families.cost_eff.architecture import Widths
from nestforge.exporters.families.cost_eff.model import CostEffModel

KEPT_HEADS = [torch.tensor([0, 3]), torch.tensor([1, 2]), torch.tensor([2, 3])]
KEPT_FFN = [torch.tensor([0, 4, 11]), torch.tensor([1, 2, 3]), torch.tensor([5, 9, 10])]


def without(model: CostEffModel) -> None:
    """Zeroes what the dropped heads and channels add."""
    with torch.no_grad():
        for layer, heads, channels in zip(model.encoder.layer, KEPT_HEADS, KEPT_FFN, strict=True):
            for head in set(range(4)) - set(heads.tolist()):
                layer.attention.output.dense.weight[:, 4 * head : 4 * head + 4] = 0
            for channel in set(range(12)) - set(channels.tolist()):
                layer.output.dense.weight[:, channel] = 0


def test_dropping_what_adds_nothing_changes_nothing(model: CostEffModel, batch: Batch) -> None:
    without(model)
    thin = slender(model, KEPT_HEADS, KEPT_FFN, rank=16)  # the full rank: nothing lost there either
    assert thin.architecture.layers == (Widths(2, 3),) * 3
    assert thin.architecture.rank == 16
    before, after = forward(model, batch), forward(thin, batch)
    torch.testing.assert_close(torch.stack(after.states), torch.stack(before.states), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.stack(after.logits), torch.stack(before.logits), rtol=1e-4, atol=1e-4)


def test_a_copy_of_its_own_that_can_be_cut_again(model: CostEffModel, batch: Batch) -> None:
    thin = slender(model, KEPT_HEADS, KEPT_FFN, rank=8)
    thinner = slender(thin, [torch.tensor([1])] * 3, [torch.tensor([0, 2])] * 3, rank=4)
    assert thinner.architecture.layers == (Widths(1, 2),) * 3
    kept = model.encoder.layer[0].attention.self.query.weight[12:16]  # head 3 is the second that stayed
    assert torch.equal(thinner.encoder.layer[0].attention.self.query.weight, kept)
    assert torch.linalg.matrix_rank(word_embedding(thin)) == 8
    assert torch.linalg.matrix_rank(word_embedding(thinner)) == 4
    left, values, right = torch.linalg.svd(word_embedding(model))
    best = left[:, :4] * values[:4] @ right[:4]
    torch.testing.assert_close(word_embedding(thinner), best, rtol=1e-4, atol=1e-4)
    forward(thinner, batch).logits[-1].sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_best_stay_in_their_order() -> None:
    importance = Importance([torch.tensor([0.1, 0.9, 0.5, 0.5])], [torch.tensor([3.0, 1.0, 2.0])])
    heads, channels = most_important(importance, Target(heads=2, ffn=1, rank=1))
    assert [ids.tolist() for ids in heads] == [[1, 2]]
    assert [ids.tolist() for ids in channels] == [[0]]


def test_the_published_schedule() -> None:
    steps = schedule(Target(12, 3072, 768), Target(2, 256, 128), 10)
    assert [step.heads for step in steps] == [11, 10, 9, 8, 7, 6, 5, 4, 3, 2]
    assert [step.ffn for step in steps] == [2790, 2508, 2227, 1945, 1664, 1382, 1100, 819, 537, 256]
    assert [step.rank for step in steps] == [704, 640, 576, 512, 448, 384, 320, 256, 192, 128]


@given(start=st.tuples(*[st.integers(1, 4000)] * 3), shares=st.tuples(*[st.floats(0, 1)] * 3), steps=st.integers(1, 30))
def test_widths_never_grow_and_end_at_the_target(
    start: tuple[int, int, int], shares: tuple[float, float, float], steps: int
) -> None:
    end = tuple(max(1, int(size * share)) for size, share in zip(start, shares, strict=True))
    path = [Target(*start), *schedule(Target(*start), Target(*end), steps)]
    assert len(path) == steps + 1
    assert path[-1] == Target(*end)
    for wide, thin in pairwise(path):
        assert thin.heads <= wide.heads
        assert thin.ffn <= wide.ffn
        assert thin.rank <= wide.rank


@pytest.mark.parametrize("rank", [4, 12])
def test_a_smaller_rank_changes_the_embedding_alone(model: CostEffModel, rank: int) -> None:
    everything = [torch.arange(4)] * 3, [torch.arange(12)] * 3
    thin = slender(model, *everything, rank)
    changed = {n for n, p in thin.named_parameters() if not torch.equal(p, model.state_dict().get(n, torch.empty(0)))}
    assert changed == {"embeddings.word_embeddings.weight", "embeddings.word_projection.weight"}
