from __future__ import annotations

import pytest
import torch
from nestforge.errors import InputError
from nestforge.exporters.families.coda.config import ImageInput
from nestforge.exporters.families.coda.model import ImageEmbeddings, TextEmbeddings, make_embeddings
from support.tiny_coda import OF_IMAGES, coda_config, tiny_coda

IDS = torch.tensor([[3, 1, 2], [5, 0, 9]])


def test_words_kinds_and_places_are_added_and_normed_where_norms_come_last() -> None:
    made = tiny_coda(coda_config(position="learned", type_vocab_size=2, norm_place="after", norm="layer")).embeddings
    assert isinstance(made, TextEmbeddings)
    kinds = torch.tensor([[0, 1, 1], [1, 0, 0]])
    found = made(IDS, kinds)
    for row in range(2):
        for place in range(3):
            assert made.token_type is not None
            assert made.position is not None
            assert made.norm is not None
            summed = made.word.weight[IDS[row, place]] + made.token_type.weight[kinds[row, place]]
            expected = made.norm(summed + made.position.weight[place])
            torch.testing.assert_close(found[row, place], expected)


def test_one_kind_of_token_is_every_token_s() -> None:
    config = coda_config(type_vocab_size=1)
    made = make_embeddings(config)
    assert config.inputs == ("input_ids", "attention_mask")
    assert isinstance(made, TextEmbeddings)
    assert made.token_type is not None
    torch.testing.assert_close(made(IDS), made.word(IDS) + made.token_type.weight[0])


def test_patches_are_products_row_by_row_behind_the_front_token() -> None:
    made = tiny_coda(coda_config(**OF_IMAGES, position="learned")).embeddings
    assert isinstance(made, ImageEmbeddings)
    assert made.front is not None
    assert made.position is not None
    pixels = torch.randn(2, 2, 8, 12)
    found = made(pixels) - made.position.weight
    assert found.shape == (2, 7, 32)
    torch.testing.assert_close(found[:, 0], made.front.expand(2, -1), rtol=0, atol=1e-5)
    for row in range(2):
        for across in range(3):
            patch = pixels[:, :, 4 * row : 4 * row + 4, 4 * across : 4 * across + 4]
            expected = patch.flatten(1) @ made.patch.weight.flatten(1).T + made.patch.bias
            torch.testing.assert_close(found[:, 1 + 3 * row + across], expected, rtol=0, atol=1e-4)


def test_pixels_that_fill_no_patch_are_left_out() -> None:
    image = ImageInput(channels=2, height=11, width=9, patch_height=4, patch_width=4, front_tokens=0)
    made = tiny_coda(coda_config(**{**OF_IMAGES, "image": image})).embeddings
    pixels = torch.randn(1, 2, 11, 9)
    found = made(pixels)
    assert found.shape == (1, image.tokens, 32) == (1, 4, 32)
    pixels[:, :, 8:] = pixels[..., 8:] = 7
    assert torch.equal(made(pixels), found)


def test_longer_rows_than_the_model_takes_are_refused() -> None:
    with pytest.raises(InputError, match=r"^25 tokens: the model takes at most 24$"):
        make_embeddings(coda_config())(torch.zeros(1, 25, dtype=torch.int64))
