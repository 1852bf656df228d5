from __future__ import annotations

import torch
from support.tiny_coda_t5 import encoder_config, pair_config, tiny_pair

DRAW = torch.Generator().manual_seed(0)
READ, WRITTEN = (torch.randint(0, 40, (2, 9), generator=DRAW) for _ in range(2))
MASK = (torch.arange(9) < torch.tensor([[9], [6]])).long()


def test_padding_of_both_texts_changes_nothing() -> None:
    model = tiny_pair(pair_config())
    model.encoder.reduction = 1  # at others k follows from the padded length
    logits = model(READ, MASK, WRITTEN)
    assert logits.shape == (2, 9, 40)
    alone = model(READ[1:, :6], MASK[1:, :6], WRITTEN[1:, :4])
    torch.testing.assert_close(logits[1:, :4], alone, rtol=0, atol=1e-5)


def test_a_row_of_fewer_tokens_than_the_reduction_has_one_computed() -> None:
    model = tiny_pair(pair_config(encoder_config(reduction=3)))
    _, found = model.encoder.routed(READ[:1, :2], None)
    assert found[0].chosen.shape == (1, 1)
    assert model(READ[:, :1], MASK[:, :1], WRITTEN).shape == (2, 9, 40)


def test_the_head_is_scaled_and_tied_as_said() -> None:
    model = tiny_pair(pair_config())
    hidden = torch.ones(1, 1, 16)
    torch.testing.assert_close(model.logits(hidden)[0, 0], model.words.weight.sum(1) / 4)
    model = tiny_pair(pair_config(tie_word_embeddings=False, scale_decoder_outputs=False))
    assert model.lm_head is not None
    torch.testing.assert_close(model.logits(hidden)[0, 0], model.lm_head.weight.sum(1))
