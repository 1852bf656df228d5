from __future__ import annotations

from typing import Any

import pytest
import torch
from nestforge.errors import InputError, PlanError
from nestforge.exporters.families.coda.model import CodaEncoder
from support.tiny_coda import coda_config, tiny_coda

SETTINGS: dict[str, dict[str, Any]] = {
    "relative, to all": {},
    "relative, to selected": {"keys_of": "selected"},
    "rotary, to all": {"position": "rotary"},
    "rotary, to selected": {"position": "rotary", "keys_of": "selected", "num_key_value_heads": 1},
    "learned": {"position": "learned", "norm": "layer", "bias": True},
    "sigmoid": {"router": "sigmoid", "keys_of": "selected"},
    "first k": {"router": "first_k"},
    "a dense layer before": {"conditional_layers": (1,)},
}


def model_of(reduction: int = 2, **settings: Any) -> CodaEncoder:
    model = tiny_coda(coda_config(**settings)).double()
    model.reduction = reduction
    return model


def inputs(rows: int = 3, tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and a mask whose first row has three tokens of padding, its second all but two."""
    torch.manual_seed(1)
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    mask[0, tokens - 3 :] = 0
    mask[1, 2:] = 0
    return torch.randint(0, 40, (rows, tokens)), mask


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_rows_are_answered_alike_alone_and_together(settings: dict[str, Any]) -> None:
    model, (ids, mask) = model_of(**settings), inputs()
    together = model(ids, mask)
    for row in range(3):
        alone = model(ids[row : row + 1], mask[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_padding_holds_reaches_no_token(settings: dict[str, Any]) -> None:
    model, (ids, mask) = model_of(**settings), inputs()
    expected, other = model(ids, mask), model(torch.where(mask > 0, ids, (ids + 7) % 40), mask)
    torch.testing.assert_close(other[mask > 0], expected[mask > 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_row_of_padding_gives_no_nan(settings: dict[str, Any]) -> None:
    model, (ids, mask) = model_of(**settings).float(), inputs()
    expected = model(ids, mask)
    mask[1] = 0
    found = model(ids, mask)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=0, atol=1e-5)


def test_k_follows_the_padded_length() -> None:
    """The same text in a longer bucket is answered by another k, and so otherwise: as the model does at that length."""
    model, ids = model_of(), inputs()[0][:1]
    mask = torch.ones_like(ids)
    short = model(ids, mask)
    padded = [torch.nn.functional.pad(tensor, (0, 12)) for tensor in (ids, mask)]
    long, found = model.routed(*padded)
    assert (model.counts(12), model.counts(24)) == ({0: 6, 1: 6}, {0: 12, 1: 12})
    assert {tuple(selection.chosen.shape) for selection in found.values()} == {(1, 12)}
    assert float((long[:, :12] - short).abs().max()) > 1e-3


def test_every_token_passes_at_one_where_the_checkpoint_says_so() -> None:
    routed, dense = model_of(1), model_of(1, reduction_of_one="dense")
    ids, mask = inputs()
    assert (routed.counts(12), dense.counts(12)) == ({0: 12, 1: 12}, {})
    assert routed.routed(ids, mask)[1].keys() == {0, 1}
    assert dense.routed(ids, mask)[1] == {}
    assert float((routed(ids, mask) - dense(ids, mask)).abs().max()) > 1e-3, "gates below 1"


def test_a_dense_layer_selects_nothing() -> None:
    model, (ids, mask) = model_of(conditional_layers=(1,)), inputs()
    assert model.routed(ids, mask)[1].keys() == {1}
    assert model.layers[0].router is None


def test_classes_are_of_the_mean_of_the_tokens() -> None:
    model, (ids, mask) = model_of(num_labels=3), inputs()
    classifier, logits = model.classifier, model(ids, mask)
    assert classifier is not None
    model.classifier = None
    states = model(ids, mask)
    for row in range(3):
        torch.testing.assert_close(logits[row], classifier(states[row][mask[row] > 0].mean(0)))


def test_places_of_selected_tokens_are_their_own() -> None:
    """Where all tokens are selected, in whatever order, the answer is that of tokens in order."""
    for position in ("relative", "rotary"):
        for keys_of in ("selected", "all"):
            model, (ids, mask) = model_of(1, position=position, keys_of=keys_of, router="sigmoid"), inputs()
            expected, found = model.routed(ids, mask)
            given = {layer: torch.arange(12).expand(3, 12) for layer in found}
            torch.testing.assert_close(model.routed(ids, mask, given=given)[0], expected, rtol=0, atol=1e-12)


def test_refuses_what_it_cannot_answer() -> None:
    ids = torch.zeros(1, 25, dtype=torch.int64)
    with pytest.raises(InputError, match=r"^25 tokens: the model takes at most 24$"):
        model_of()(ids, ids + 1)
    with pytest.raises(PlanError, match=r"^coda\.reduction 4: expected 1 to 3, the tokens of a row$"):
        model_of(4)(ids[:, :3], ids[:, :3] + 1)
