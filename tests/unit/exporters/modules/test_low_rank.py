"""A linear layer with a pair beside it."""

from __future__ import annotations

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.modules.low_rank import LowRankLinear, merged, with_pairs


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2, bias=False))


def test_an_empty_pair_changes_no_bit() -> None:
    plain, x = model(), torch.randn(3, 4)
    paired = with_pairs(model(), {"0": 2, "2": 1}, "here")
    assert torch.equal(plain(x), paired(x))
    assert {name for name, _ in paired.named_parameters()} == {
        *("0.weight", "0.bias", "0.lora_A.weight", "0.lora_B.weight"),
        *("2.weight", "2.lora_A.weight", "2.lora_B.weight"),
    }


def test_merging_is_the_same_function_on_the_same_memory() -> None:
    paired, x = with_pairs(model(), {"0": 2}, "here").double(), torch.randn(3, 4).double()
    layer = paired[0]
    assert isinstance(layer, LowRankLinear)
    for pair in (layer.lora_A, layer.lora_B):
        pair.weight.data = torch.randn_like(pair.weight)
    whole = merged(paired)
    assert not any(isinstance(part, LowRankLinear) for part in whole.modules())
    torch.testing.assert_close(whole(x), paired(x), rtol=1e-13, atol=1e-13)
    assert whole[2].weight is paired[2].weight
    assert whole[0].bias is layer.bias


def test_another_layer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="here: 1 is a ReLU, and LoRA is read beside plain linear layers"):
        with_pairs(model(), {"1": 2}, "here")
