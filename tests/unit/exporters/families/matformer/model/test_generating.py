"""MatLM's keys and values, recorded in its own pass."""

from __future__ import annotations

import torch
from nestforge.exporters.families.matformer.model import RecordedLM
from support.tiny_matlm import matlm_config, tiny_matlm

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


@torch.no_grad()
def test_a_recorded_pass_is_the_models_own() -> None:
    model = tiny_matlm(matlm_config())
    logits, *kept = RecordedLM(model)(IDS)
    torch.testing.assert_close(logits, model(IDS))
    assert [tuple(tensor.shape) for tensor in kept] == [(2, 4, 6, 8)] * 6
    first = model.layers[0]
    values = first.attention.value(first.attention_norm(model.embed_tokens(IDS)))
    torch.testing.assert_close(kept[1], values.view(2, 6, 4, 8).transpose(1, 2))


@torch.no_grad()
def test_a_token_changes_no_keys_before_it() -> None:
    model, others = tiny_matlm(matlm_config()), IDS.clone()
    others[:, 4] = 0
    for before, after in zip(RecordedLM(model)(IDS), RecordedLM(model)(others), strict=True):
        place = 1 if before.ndim == 3 else 2
        assert torch.equal(before.narrow(place, 0, 4), after.narrow(place, 0, 4))
        assert not torch.equal(before, after)
