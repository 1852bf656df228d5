from __future__ import annotations

import torch
from nestforge.exporters.families.mhe.model import Embeddings, MheEncoder
from support.tiny_mhe import decoder_config, encoder_config


def test_places_are_those_that_are_given() -> None:
    torch.manual_seed(0)
    embeddings, ids = Embeddings(decoder_config()), torch.tensor([[3, 1, 2]])
    assert torch.equal(embeddings(ids, torch.tensor([[0, 1, 2]])), embeddings(ids))
    assert torch.equal(embeddings(ids[:, 1:], torch.tensor([[1, 2]])), embeddings(ids)[:, 1:])
    rotary = Embeddings(decoder_config(position="rotary"))
    assert torch.equal(rotary(ids, torch.tensor([[7, 8, 9]])), rotary.word(ids))


def test_heads_start_alike_however_their_factors_are_stored() -> None:
    """Section 2.2: at the beginning values pass through mhe_mul unchanged, nearly."""
    for factors in ("e", "1+e"):
        model = MheEncoder(encoder_config(factors=factors))
        for role in ("query", "key", "value"):
            found = model.layers[0].attention.factors(role).detach()
            assert found.shape == (4, 8)
            assert 0.8 < float(found.min()) < 1 < float(found.max()) < 1.2
    assert (model.embeddings.norm.weight == 1).all()
    assert (model.layers[0].ffn.up.bias == 0).all()
