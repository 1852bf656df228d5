"""What a translation model hands to engines that generate: keys and values of a prompt, and of its own pass."""

from __future__ import annotations

import pytest
import torch
from nestforge.exporters.families.mhe.generating import RecordedPair, SourceEncoder
from support.tiny_mhe import pair_config, tiny_mhe

READ = torch.randint(0, 40, (1, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("attention", "heads"),
    [("mha", 4), ("sha", 1), ("mqa", 1), ("skv", 4), ("el_att", 4), ("mhe_add", 1), ("mhe_mul", 1)],
)
def test_a_prompt_is_two_vectors_of_a_token_and_layer_where_heads_share_them(attention: str, heads: int) -> None:
    model = tiny_mhe(pair_config(attention=attention, num_decoder_layers=2))
    found = SourceEncoder(model)(READ)
    assert [tuple(one.shape) for one in found] == [(1, heads, 8, 6), (1, heads, 6, 8)] * 2
    if attention == "mhe_mul":
        read, cross = model.encode(READ, None), model.decoder.layers[1].cross_attention
        torch.testing.assert_close(found[2][0, 0], cross.key.weight @ read[0].T)
        torch.testing.assert_close(found[3][0, 0], cross.value(read)[0])


def test_what_is_recorded_is_the_models_own_pass() -> None:
    model, written = tiny_mhe(pair_config()).double(), torch.tensor([[1, 5, 9]])
    logits, key, value = RecordedPair(model)(written, READ)
    assert torch.equal(logits, model(READ, torch.ones_like(READ), written))
    own = model.decoder.layers[0].attention
    torch.testing.assert_close(key[:, 0], own.key(model.embeddings(written)))
    torch.testing.assert_close(value[:, 0], own.value(model.embeddings(written)))
