"""Layouts with the width of heads in front: the same function, whose first numbers of every head are a prefix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nestforge.exporters.families.mhe.attention import fold, in_forms
from nestforge.exporters.families.mhe.config import MheConfig
from nestforge.exporters.families.mhe.forms import (
    elastic_spec,
    folded_shapes,
    folded_slices,
    held_forms,
    parameters,
    places_of,
)
from nestforge.exporters.families.mhe.model import MheEncoder, made, turned
from nestforge.exporters.modules.layers import on_same_weights
from support.tiny_mhe import decoder_config, encoder_config, pair_config, tiny_mhe

LIMIT = 1e-12
KINDS = ["mha", "sha", "mqa", "skv", "mhe_add", "mhe_mul", "mhe_mul 1+e"]
# The numbers of a head of 8.
KEPT = 5


def config(kind: str, config_of: Any = encoder_config, **overrides: Any) -> MheConfig:
    attention, *stored = kind.split()
    settings = {"factors": stored[0]} if stored else {}
    return config_of(attention=attention, attention_bias=True, **settings, **overrides)


def asked(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    return model(
        *{1: (ids,), 2: (ids, mask), 3: (ids, mask, (ids + 7)[:, :5] % 40)}[model.forward.__code__.co_argcount - 1]
    )


def narrowed(model: Any, kept: int = KEPT) -> Any:
    """As the compiler narrows it: the first numbers of every head, or the first heads, by what the spec says."""
    spec, narrow = elastic_spec(model.config), on_same_weights(model)
    submodel = spec.submodel({axis.name: kept for axis in spec.axes if axis.kind != "ffn"})
    for name, parameter in list(narrow.named_parameters()):
        view = parameter.data
        for cut in spec.slices_of(name):
            view = view.narrow(cut.dim, 0, submodel[cut.axis] * cut.unit)
        at, _, own = name.rpartition(".")
        setattr(narrow.get_submodule(at), own, torch.nn.Parameter(view, False))
    return narrow


def cut_by_hand(model: Any) -> Any:
    """The first numbers of every head of a model that has heads in front, as a model of such heads: what scores are
    multiplied by stays."""
    before: MheConfig = model.config
    n, d = before.num_attention_heads, before.head_size
    found = made(replace(before, head_dim=KEPT, softmax_scale=d**-0.5)).to(torch.float64).eval()
    own = dict(model.named_parameters())
    for name, parameter in found.named_parameters():
        value = own[name]
        for dim, (have, want) in enumerate(zip(value.shape, parameter.shape, strict=True)):
            if have != want:
                heads = have // d
                assert heads in (1, n)
                value = value.unflatten(dim, (heads, d)).narrow(dim + 1, 0, KEPT).flatten(dim, dim + 1)
        parameter.data = value.data.clone()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config_of", [encoder_config, decoder_config, pair_config], ids=["encoder", "decoder", "pair"])
def test_a_turned_model_is_the_same_and_its_narrow_heads_are_those_cut_by_hand(config_of: Any, kind: str) -> None:
    model = tiny_mhe(config(kind, config_of)).double()
    other = turned(model)
    assert (asked(other) - asked(model)).abs().max() < LIMIT
    assert (asked(narrowed(other)) - asked(cut_by_hand(model))).abs().max() < LIMIT
    back = dict(turned(other).named_parameters())
    assert all(torch.equal(back[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("kind", ["mhe_add", "mhe_mul", "mhe_mul 1+e"])
@pytest.mark.parametrize("config_of", [encoder_config, decoder_config, pair_config], ids=["encoder", "decoder", "pair"])
def test_every_form_of_narrow_heads(config_of: Any, kind: str) -> None:
    """In float64, against the literal module as it is narrowed."""
    model = narrowed(tiny_mhe(config(kind, config_of, layout="width_first")).double())
    roles, expected = {place.role for place in places_of(model.config)}, asked(model)
    for form in held_forms(model.config):
        assert (asked(in_forms(model, dict.fromkeys(roles, form))) - expected).abs().max() < LIMIT, form


@pytest.mark.parametrize("kind", ["mhe_add", "mhe_mul"])
@pytest.mark.parametrize(("layout", "kept"), [("heads_first", 3), ("width_first", KEPT)])
def test_slicing_first_and_folding_second_is_a_prefix_of_what_is_folded(kind: str, layout: str, kept: int) -> None:
    """Section 8, to the bit, in float32."""
    model = tiny_mhe(config(kind, layout=layout))
    whole, narrow = model.layers[0].attention, narrowed(model, kept).layers[0].attention
    axis = places_of(model.config)[0].axis
    for name, cut in folded_slices(model.config, "", axis).items():
        folded = fold(whole, name.removeprefix("."))
        assert tuple(folded.shape) == folded_shapes(model.config, "")[name]
        expected = folded if cut is None else folded.narrow(cut.dim, 0, kept * cut.unit)
        assert torch.equal(fold(narrow, name.removeprefix(".")), expected), name


def test_places_are_those_that_are_given() -> None:
    embeddings, ids = tiny_mhe(decoder_config()).embeddings, torch.tensor([[3, 1, 2]])
    assert torch.equal(embeddings(ids, position_ids=torch.tensor([[0, 1, 2]])), embeddings(ids))
    assert torch.equal(embeddings(ids[:, 1:], position_ids=torch.tensor([[1, 2]])), embeddings(ids)[:, 1:])
    rotary = tiny_mhe(decoder_config(position="rotary")).embeddings
    assert torch.equal(rotary(ids, position_ids=torch.tensor([[7, 8, 9]])), rotary.word(ids))


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
    assert shapes == parameters(config).shapes
    before = model(READ, MASK, WRITTEN)
    model.lm_head.weight *= 2
    torch.testing.assert_close(model(READ, MASK, WRITTEN), 2 * before)
