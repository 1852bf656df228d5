from __future__ import annotations

import pytest
import torch
from nestforge.exporters.families.mhe.shapes import encoder_decoder_shapes
from support.tiny_mhe import pair_config, tiny_mhe

DRAW = torch.Generator().manual_seed(0)
READ, WRITTEN = torch.randint(0, 40, (2, 7), generator=DRAW), torch.randint(0, 40, (2, 5), generator=DRAW)
MASK = torch.ones_like(READ).index_fill(1, torch.tensor([5, 6]), 0)


@pytest.mark.parametrize("attention", ["mha", "sha", "mhe_add", "mhe_mul"])
def test_a_position_sees_the_first_text_and_what_is_written_up_to_it(attention: str) -> None:
    model = tiny_mhe(pair_config(attention=attention, num_decoder_layers=2))
    logits = model(READ, MASK, WRITTEN)
    assert logits.shape == (2, 5, 40)
    changed = WRITTEN.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 40
    other = model(READ, MASK, changed)
    torch.testing.assert_close(other[:, :3], logits[:, :3], rtol=0, atol=1e-5)
    assert (other[:, 3:] - logits[:, 3:]).abs().amax((0, 2)).min() > 1e-3, "and later positions see it"
    padded, read = READ.clone(), READ.clone()
    padded[:, 6], read[:, 4] = (padded[:, 6] + 1) % 40, (read[:, 4] + 1) % 40
    torch.testing.assert_close(model(padded, MASK, WRITTEN), logits, rtol=0, atol=1e-5)
    assert (model(read, MASK, WRITTEN) - logits).abs().amax((0, 2)).min() > 1e-3, "every position reads the first text"


def test_padding_of_the_first_text_is_as_if_it_were_not_there() -> None:
    model = tiny_mhe(pair_config()).double()
    short = model(READ[:, :5], MASK[:, :5], WRITTEN)
    torch.testing.assert_close(model(READ, MASK, WRITTEN), short, rtol=0, atol=1e-12)


def test_a_matrix_of_its_own_back_to_the_vocabulary() -> None:
    config = pair_config(tie_word_embeddings=False)
    model = tiny_mhe(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == encoder_decoder_shapes(config)
    before = model(READ, MASK, WRITTEN)
    model.lm_head.weight *= 2
    torch.testing.assert_close(model(READ, MASK, WRITTEN), 2 * before)
