"""Forms A to E equal the literal module in float64 (section 6), and so do slices of what they fold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nestforge.exporters.families.mhe.attention_forms import fold, folded_tensor, in_forms, lower
from nestforge.exporters.families.mhe.config import MheDecoderConfig
from nestforge.exporters.families.mhe.forms import folded_shapes, folded_slices, held_forms
from nestforge.exporters.modules.layers import Answering
from support.tiny_mhe import decoder_config, encoder_config, pair_config, tiny_mhe

LIMIT = 1e-12
ROLES = ("encoder_attention", "decoder_attention", "cross_attention")


def in_one_form(model: Any, form: str) -> Any:
    return in_forms(model, {"attention": form})


def inputs(is_decoder: bool) -> Iterator[tuple[torch.Tensor, ...]]:
    """Whole rows, rows with tokens hidden on either side and in between, and a single token."""
    draw = torch.Generator().manual_seed(1)
    for tokens in (11, 1):
        ids = torch.randint(0, 40, (3, tokens), generator=draw)
        if is_decoder:
            yield (ids,)
            continue
        mask = torch.ones_like(ids)
        yield ids, mask
        if tokens > 1:
            hidden = mask.clone()
            hidden[0, 5:], hidden[1, :3], hidden[2, 4] = 0, 0, 0
            yield ids, hidden


@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("kind", ["mhe_add", "mhe_mul", "mhe_mul 1+e"])
@pytest.mark.parametrize("config_of", [encoder_config, decoder_config], ids=["encoder", "decoder"])
def test_every_form_that_holds(config_of: Any, kind: str, position: str, bias: bool) -> None:
    attention, *stored = kind.split()
    factors = {"factors": stored[0]} if stored else {}
    config = config_of(attention=attention, attention_bias=bias, position=position, **factors)
    model = tiny_mhe(config).double()
    for given in inputs(isinstance(config, MheDecoderConfig)):
        expected = model(*given)
        for form in held_forms(config):
            assert (in_one_form(model, form)(*given) - expected).abs().max() < LIMIT, form


@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize("kind", ["mhe_add", "mhe_mul"])
def test_every_form_in_every_role_of_two_sides(kind: str, bias: bool) -> None:
    """The second text is shorter than the first; in each role one form after the other, the others as they are written,
    and all at once."""
    config = pair_config(attention=kind, attention_bias=bias, num_decoder_layers=2)
    model, written = tiny_mhe(config).double(), dict.fromkeys(ROLES, "literal")
    for ids, mask in inputs(is_decoder=False):
        given = (ids, mask, (ids + 7)[:, :5] % 40)
        expected = model(*given)
        for form in held_forms(config):
            for forms in (*({**written, role: form} for role in ROLES), dict.fromkeys(ROLES, form)):
                assert (in_forms(model, forms)(*given) - expected).abs().max() < LIMIT, forms


def test_heads_of_another_size_and_a_scale_that_is_stated() -> None:
    for attention in ("mhe_add", "mhe_mul"):
        config = encoder_config(attention=attention, head_dim=5, softmax_scale=0.7)
        model = tiny_mhe(config).double()
        for given in inputs(is_decoder=False):
            for form in held_forms(config):
                assert (in_one_form(model, form)(*given) - model(*given)).abs().max() < LIMIT, form


def test_a_row_without_a_token_is_the_same_in_every_form() -> None:
    """Its probabilities are even and sum to 1: the finite mask decides what 6.8 leaves open. But for exponentials that
    are taken apart: there what a head adds to keys still counts, and the answer is a finite one."""
    config = encoder_config(attention="mhe_add")
    model, ids = tiny_mhe(config).double(), torch.randint(0, 40, (1, 6))
    assert in_one_form(model, "one_exponential")(ids, torch.zeros_like(ids)).isfinite().all()
    for form in set(held_forms(config)) - {"one_exponential"}:
        found = in_one_form(model, form)(ids, torch.zeros_like(ids))
        assert (found - model(ids, torch.zeros_like(ids))).abs().max() < LIMIT, form


@pytest.mark.parametrize(
    "form", ["literal", "expanded", "expanded_queries", "normal", "shared_scores", "one_exponential"]
)
def test_keys_of_mhe_add_have_no_effect(form: str) -> None:
    """Section 6.4: neither their head embeddings, at random here, nor a bias of their seed."""
    model = tiny_mhe(encoder_config(attention="mhe_add", attention_bias=True)).double()
    ids, mask = next(inputs(is_decoder=False))
    before = in_one_form(model, form)(ids, mask)
    for layer in model.layers:
        layer.attention.embedding["key"].normal_(std=3)
        layer.attention.key.bias.normal_(std=3)
    assert (in_one_form(model, form)(ids, mask) - before).abs().max() < LIMIT
    if form not in ("literal", "expanded"):  # which do not read them at all
        for layer in model.layers:
            layer.attention.embedding["key"].fill_(torch.nan)
        assert (in_one_form(model, form)(ids, mask) - before).abs().max() < LIMIT


def test_exponentials_taken_apart_lose_what_the_bound_on_weights_refuses() -> None:
    """In float32, of a head that weighs keys more than exp(1000) apart: what is left of those that a token reads is 0,
    and so is their sum. Less than exp(8) apart they are as exact as in any form."""
    config, ids = encoder_config(attention="mhe_add", num_hidden_layers=1, softmax_scale=3.0), torch.arange(24)[None]
    near, wide = (
        [in_one_form(tiny_mhe(config, far), form)(ids, torch.ones_like(ids)) for form in ("one_exponential", "normal")]
        for far in (0.05, 10.0)
    )
    assert (near[0] - near[1]).abs().max() < 1e-5
    assert wide[1].isfinite().all()
    assert wide[0].isnan().any()


@pytest.mark.parametrize("attention", ["mhe_add", "mhe_mul"])
def test_slicing_first_and_folding_second_is_a_prefix_of_what_is_folded(attention: str) -> None:
    """Section 8, to the bit, in float32."""
    config = encoder_config(attention=attention, attention_bias=True)
    whole = tiny_mhe(config).layers[0].attention
    narrow = tiny_mhe(config).layers[0].attention
    for name, table in narrow.embedding.items():
        narrow.embedding[name] = torch.nn.Parameter(table[:3], False)
    narrow.output.weight = torch.nn.Parameter(narrow.output.weight[:, :24], False)
    for name, cut in folded_slices(config, "", "heads").items():
        made = fold(whole, name.removeprefix("."))
        assert tuple(made.shape) == folded_shapes(config, "")[name]
        kept = made if cut is None else made.narrow(cut.dim, 0, 3 * cut.unit)
        assert torch.equal(fold(narrow, name.removeprefix(".")), kept), name


def test_a_lowered_module_has_the_weights_of_the_users() -> None:
    module = Answering(tiny_mhe(encoder_config()))
    lowered = lower(module, {"attention": "normal"})
    own = dict(lowered.named_parameters())
    assert own["model.layers.1.attention.query.weight"] is module.model.layers[1].attention.query.weight
    name = "layers.1.attention.folded.query"
    assert torch.equal(own[f"model.{name}"], folded_tensor(module, name))
    assert "model.layers.1.attention.embedding.query" not in own
    assert module.model.layers[1].attention is not lowered.model.layers[1].attention
