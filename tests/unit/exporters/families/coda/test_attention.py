"""Tests."""

from __future__ import annotations

import torch
from nestforge.exporters.families.coda.attention import Attention, Places, RelativeBias, relative_bucket
from support.tiny_coda import coda_config
from transformers.models.t5.modeling_t5 import T5Attention


def test_shared_keys_are_those_of_neighbouring_heads() -> None:
    """Grouped attention is that of every head with its group's keys and values repeated."""
    torch.manual_seed(0)
    grouped = Attention(coda_config(num_key_value_heads=2)).requires_grad_(False)
    whole = Attention(coda_config()).requires_grad_(False)
    for part in ("query", "output"):
        getattr(whole, part).weight = getattr(grouped, part).weight
    for part in ("key", "value"):
        rows = getattr(grouped, part).weight.view(2, 8, 32)
        getattr(whole, part).weight.data = rows.repeat_interleave(2, 0).flatten(0, 1)
    asking, read, added = torch.randn(3, 2, 32), torch.randn(3, 5, 32), torch.randn(3, 4, 2, 5)
    found, expected = (module(asking, read, added, None, None) for module in (grouped, whole))
    torch.testing.assert_close(found, expected)
    assert found.shape == (3, 2, 32)


MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def test_buckets_are_those_of_t5() -> None:
    found = [relative_bucket(step) for step in range(-600, 600)]
    assert found == T5Attention._relative_position_bucket(torch.arange(-600, 600), bidirectional=True).tolist()


def test_every_pair_reads_its_bucket() -> None:
    bias = RelativeBias(3)
    bias.weight.data = torch.randn(32, 3)
    found = bias(300)  # longer than what the buckets tell apart
    assert found.shape == (3, 300, 300)
    for query in range(0, 300, 13):
        for key in range(0, 300, 7):
            assert torch.equal(found[:, query, key], bias.weight[relative_bucket(key - query)])


def test_masks_and_biases_follow_the_selected_tokens() -> None:
    relative = RelativeBias(3)
    relative.weight.data = torch.randn(32, 3)
    bias = relative(4)
    places = Places.of(MASK, bias, relative, None)
    asking, read = torch.tensor([[2, 0], [1, 3]]), torch.tensor([[3, 1, 2], [0, 2, 1]])
    lowest = torch.finfo(torch.float32).min
    for row in range(2):
        hidden = torch.where(MASK[row] > 0, 0.0, lowest)
        whole, rows, both = places.added()[row], places.added(asking)[row], places.added(asking, read)[row]
        torch.testing.assert_close(whole, bias + hidden)
        torch.testing.assert_close(rows, (bias + hidden)[:, asking[row]])
        torch.testing.assert_close(both, (bias + hidden)[:, asking[row]][..., read[row]])


def test_without_a_bias_the_mask_is_all_that_is_added() -> None:
    places = Places.of(MASK, torch.zeros(2, 4, 1), None, None)
    assert places.added().shape == (2, 1, 1, 4)
    assert places.added(torch.tensor([[2], [1]]), torch.tensor([[3], [1]])).shape == (2, 1, 1, 1)
    assert places.turn() is None


def test_selected_tokens_are_turned_by_their_own_positions() -> None:
    places = Places.of(MASK, torch.zeros(2, 4, 1), None, 8)
    states, tokens = torch.randn(2, 3, 4, 8), torch.tensor([[2, 0], [1, 3]])
    every, some = places.turn(), places.turn(tokens)
    assert every is not None
    assert some is not None
    picked = tokens[:, None, :, None].expand(2, 3, 2, 8)
    torch.testing.assert_close(some(states.gather(2, picked)), every(states).gather(2, picked))
