"""Batches: every text once an epoch, neighbours of similar length, the same order for the same seed."""

from __future__ import annotations

import random

import torch
from nestforge.examples.train.exits.batches import Rows


def rows_of(lengths: list[int]) -> Rows:
    return Rows([[row + 1] * length for row, length in enumerate(lengths)], list(range(len(lengths))), pad=0)


def test_padding_is_masked_and_fills_up_to_the_longest() -> None:
    batch = rows_of([2, 4, 1]).batch([0, 2, 1])
    assert batch.input_ids.tolist() == [[1, 1, 0, 0], [3, 0, 0, 0], [2, 2, 2, 2]]
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert batch.labels.tolist() == [0, 2, 1]


def test_in_order_leaves_nothing_out() -> None:
    batches = rows_of([3] * 7).in_order(3)
    assert [batch.labels.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]


def test_an_epoch_has_every_text_once_and_little_padding() -> None:
    chance = random.Random(0)
    rows = rows_of([chance.randint(3, 64) for _ in range(256)])
    epoch = rows.shuffled(size=16, steps=16, seed=3)
    assert sorted(int(label) for batch in epoch for label in batch.labels) == list(range(256))
    real = sum(int(batch.attention_mask.sum()) for batch in epoch)
    assert real == rows.tokens
    assert real > 0.9 * sum(batch.attention_mask.numel() for batch in epoch)


def test_steps_and_seed_decide_the_order() -> None:
    rows = rows_of([5, 6, 7, 8, 9])
    first, again, other = (rows.shuffled(2, 7, seed) for seed in (0, 0, 1))
    assert len(first) == 7  # three batches an epoch
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(first, again, strict=True))
    assert any(a.labels.tolist() != b.labels.tolist() for a, b in zip(first, other, strict=True))
