from __future__ import annotations

import torch
from nestforge.exporters.families.coda.attention import Attention
from support.tiny_coda import coda_config


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
