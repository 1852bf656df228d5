"""How far apart heads may weigh two keys: a bound that no token exceeds, and the exact figure of plain embeddings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.planning.candidate import chosen_variants
from nestforge.errors import CheckpointError, PlanError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from nestforge.exporters.families.mhe.forms import (
    CROSS,
    DECODER,
    ENCODER,
    Place,
    cached_form,
    cached_heads,
    elastic_spec,
    folded_shapes,
    folded_slices,
    held_forms,
    key_spread,
    layers_of,
    parameter_group,
    parameters,
    places_of,
)
from nestforge.exporters.source import open_source
from safetensors.torch import load_file, save_file
from support.tiny_compile import board
from support.tiny_mhe import (
    FAR,
    decoder_config,
    encoder_config,
    pair_config,
    save_tiny_mhe,
    save_tiny_pair,
    tiny_mhe,
)


def test_which_forms_hold() -> None:
    every = ("normal", "one_head", "shared_scores", "one_exponential", "expanded_queries", "expanded", "literal")
    assert held_forms(encoder_config(attention="mhe_add")) == every
    assert "one_exponential" not in held_forms(encoder_config(attention="mhe_add"), float("nan"))
    assert held_forms(encoder_config()) == ("normal", "one_head", "expanded_queries", "expanded", "literal")
    assert "one_head" not in held_forms(decoder_config())
    layouts = {
        axis: "one_head" in held_forms(encoder_config(layout="width_first", elastic_heads=axis))
        for axis in (False, True)
    }
    assert layouts == {False: True, True: False}, "a width that is no axis"
    pair = {role: "one_head" in held_forms(pair_config(), role=role) for role in (ENCODER, DECODER, CROSS, None)}
    assert pair == {ENCODER: True, DECODER: False, CROSS: True, None: False}
    for attention in ("mhe_add", "mhe_mul"):
        assert held_forms(encoder_config(attention=attention, position="rotary")) == ("expanded", "literal")
    assert held_forms(encoder_config(attention="mha")) == ()


def test_heads_of_a_cache() -> None:
    shared = [decoder_config(attention=kind) for kind in ("mhe_add", "mhe_mul", "mqa", "sha")]
    own = [decoder_config(attention=kind) for kind in ("mha", "skv", "el_att")]
    assert [cached_heads(config) for config in (*shared, *own)] == [1, 1, 1, 1, 4, 4, 4]
    rotary = decoder_config(position="rotary")
    assert (cached_form(rotary), cached_heads(rotary)) == ("literal", 4)


@pytest.mark.parametrize(
    ("changes", "form", "problem"),
    [
        ({}, "shared_scores", "a head of mhe_mul stretches queries and keys by factors of its own; one matrix"),
        (
            {"position": "rotary"},
            "normal",
            "rotary positions turn keys after their head embeddings, so that heads do not",
        ),
        ({"position": "rotary", "attention": "mhe_add"}, "shared_scores", "rotary positions turn keys after"),
        ({"attention": "mha"}, "normal", "mha attention has no head embeddings, and one form alone"),
        ({}, "one_exponential", "a head of mhe_mul stretches queries and keys by factors of its own; one matrix"),
        (
            {"layout": "width_first"},
            "one_head",
            "a mask lies behind the numbers of each head, which shrink here; normal",
        ),
        ({"decoder": True}, "one_head", "the operator takes one mask for all queries of a row, and a decoder's tokens"),
        ({}, "flash", "expected one of normal, one_head, expanded_queries, expanded, literal"),
    ],
)
def test_a_form_that_does_not_hold_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], form: str, problem: str
) -> None:
    source = open_source(save_tiny_mhe(tmp_path / "m", **changes))
    with pytest.raises(PlanError, match=f"^variant attention={form}: {problem}"):
        chosen_variants(source, source.spec.universal(), Bucket(1, 8), board(variants={"attention": form}))


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"cross_attention": "shared_scores"}, "cross_attention=shared_scores: a head of mhe_mul stretches queries"),
        ({"attention": "normal"}, "attention=normal: no such computation in this model"),
        ({"decoder_attention": "flash"}, "decoder_attention=flash: expected one of normal, expanded_queries, expanded"),
    ],
)
def test_a_form_of_one_role_is_refused(tmp_path: Path, wanted: dict[str, str], problem: str) -> None:
    source = open_source(save_tiny_pair(tmp_path / "m"))
    with pytest.raises(PlanError, match=f"^variant {problem}"):
        chosen_variants(source, source.spec.universal(), Bucket(1, 8), board(variants=wanted))


def test_each_role_has_the_form_that_is_cheapest_there() -> None:
    source = open_source("preset:mhe-add-encoder-decoder-base")
    found = chosen_variants(
        source, source.spec.universal(), Bucket(1, 100), board(variants={"decoder_attention": "literal"})
    )
    assert found == {
        "encoder_attention": "one_exponential",
        "decoder_attention": "literal",
        "cross_attention": "one_exponential",
    }


def test_exponentials_are_taken_apart_only_where_the_weights_keep_them_near(tmp_path: Path) -> None:
    """Refused with the bound; a model whose heads weigh keys nearly alike has the form, and prompts are read in it."""
    wide = open_source(save_tiny_mhe(tmp_path / "wide", attention="mhe_add"))
    asked = board(variants={"attention": "one_exponential"})
    problem = r"^variant attention=one_exponential: by the weights of this model a head may weigh two keys exp\(\d+"
    with pytest.raises(PlanError, match=problem):
        chosen_variants(wide, wide.spec.universal(), Bucket(1, 8), asked)
    assert "one_exponential" not in wide.variants(wide.spec.universal(), Bucket(1, 8))["attention"]
    near = open_source(save_tiny_mhe(tmp_path / "near", attention="mhe_add", far=FAR))
    assert chosen_variants(near, near.spec.universal(), Bucket(1, 8), asked) == {"attention": "one_exponential"}
    for far, form in ((1.0, "shared_scores"), (FAR, "one_exponential")):
        cached = open_source(save_tiny_pair(tmp_path / form, attention="mhe_add", far=far)).architecture.cached
        assert cached.variants["encoder_attention"] == form


def test_the_cheapest_form_on_a_device() -> None:
    """Scores shared by all heads save products and exponentials; of mhe_mul the normal form has the fewest weights and
    products, and where ONNX Runtime computes it in fp32, scores of long texts need not be written."""
    tensorrt = board(backend="tensorrt")
    for preset, tokens, device, form in (
        ("mhe-add-encoder-base", 512, board(), "one_exponential"),
        ("mhe-mul-encoder-base", 512, board(), "one_head"),
        ("mhe-mul-encoder-base", 128, board(), "normal"),
        ("mhe-mul-encoder-base", 512, tensorrt, "normal"),
        ("mhe-mul-decoder-base", 512, board(), "normal"),
    ):
        source = open_source(f"preset:{preset}")
        assert chosen_variants(source, source.spec.universal(), Bucket(1, tokens), device) == {"attention": form}


def test_two_sides() -> None:
    config = pair_config(num_decoder_layers=2)
    assert layers_of(config) == ("encoder.layers.0", "decoder.layers.0", "decoder.layers.1")
    assert places_of(config)[:3] == (
        Place("encoder.layers.0.attention", "encoder.layers.0.heads", "encoder_attention"),
        Place("decoder.layers.0.attention", "decoder.layers.0.heads", "decoder_attention"),
        Place("decoder.layers.0.cross_attention", "decoder.layers.0.cross_heads", "cross_attention"),
    )
    assert [place.axis for place in places_of(pair_config(attention="mha"))] == [
        "encoder.layers.0.heads",
        "decoder.layers.0.heads",
        "decoder.layers.0.cross_heads",
    ]


def test_every_place_is_a_module_of_the_model() -> None:
    for config in (encoder_config(), decoder_config(), pair_config()):
        model = tiny_mhe(config)
        found = [name for name, part in model.named_modules() if type(part).__name__ == "Attention"]
        assert found == [place.at for place in places_of(config)]


ADD: dict[str, Any] = {"attention": "mhe_add", "num_hidden_layers": 2}
DRAW = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 40, (64, 24), generator=DRAW)


def spreads(model: Any, given: tuple[torch.Tensor, ...]) -> list[float]:
    """Numbers that each sublayer's heads add to the keys of a pass, the largest less the smallest."""
    found: list[float] = []

    def watch(attention: Any, made: Any) -> None:
        key = made @ attention.key.weight.T * attention.config.scale
        by_key = key @ attention.embedding["query"].T
        found.append(float((by_key.flatten(0, 1).amax(0) - by_key.flatten(0, 1).amin(0)).max()))

    for place in places_of(model.config):
        attention = model.get_submodule(place.at)
        made = attention.keys_and_values
        attention.keys_and_values = lambda hidden, turn=None, own=attention, made=made: (
            watch(own, hidden) or made(hidden, turn)
        )
    model(*given)
    return found


@pytest.mark.parametrize("kind", ["encoder", "decoder", "pair"])
def test_no_token_exceeds_the_bound(tmp_path: Path, kind: str) -> None:
    config: Any = {"encoder": encoder_config, "decoder": decoder_config, "pair": pair_config}[kind](**ADD)
    folder = save_tiny_pair(tmp_path / "m", **ADD) if kind == "pair" else None
    checkpoint = open_checkpoint(folder or save_tiny_mhe(tmp_path / "m", kind == "decoder", **ADD))
    model = tiny_mhe(config)
    if kind == "pair":
        model.embeddings.position.weight *= 5
    ones = torch.ones_like(IDS)
    given = {"encoder": (IDS, ones), "decoder": (IDS,), "pair": (IDS, ones, IDS)}[kind]
    found, bound = spreads(model, given), key_spread(checkpoint, config)
    assert len(found) == len(places_of(config))
    assert max(found) <= bound < 4 * max(found), "and the bound is no wild one"


def test_of_embeddings_it_is_what_the_tables_hold(tmp_path: Path) -> None:
    """Where every sublayer but those that read embeddings adds nothing."""
    config = pair_config(**ADD)
    folder = save_tiny_pair(tmp_path / "m", **ADD)
    weights = load_file(folder / "model.safetensors")
    for place in places_of(config):
        if place.at != "encoder.layers.0.attention":
            weights[f"{place.at}.embedding.query"].zero_()
    save_file(weights, folder / "model.safetensors")
    at = "encoder.layers.0.attention"
    u = weights[f"{at}.embedding.query"] @ weights[f"{at}.key.weight"] * config.scale
    words, places = (weights[f"embeddings.{name}.weight"].double() @ u.double().T for name in ("word", "position"))
    every = (words[:, None] + places[None]).flatten(0, 1)
    expected = (every.amax(0) - every.amin(0)).max().item()
    assert key_spread(open_checkpoint(folder), config) == pytest.approx(expected, rel=1e-6)


def test_weights_in_bfloat16_are_read(tmp_path: Path) -> None:
    config, folder = encoder_config(**ADD), save_tiny_mhe(tmp_path / "m", **ADD)
    whole = key_spread(open_checkpoint(folder), config)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
    np.testing.assert_allclose(key_spread(open_checkpoint(folder), config), whole, rtol=0.02)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    config, folder = encoder_config(**ADD), save_tiny_mhe(tmp_path / "m", **ADD)
    weights = load_file(folder / "model.safetensors")
    name = f"{places_of(config)[0].at}.embedding.query"
    weights[name][0, 0] = torch.inf
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"^{folder}: tensor {name} holds NaN or infinite values$"):
        key_spread(open_checkpoint(folder), config)


def test_other_kinds_and_models_without_weights_have_none(tmp_path: Path) -> None:
    folder = save_tiny_mhe(tmp_path / "m")
    assert key_spread(open_checkpoint(folder), encoder_config()) == 0
    assert key_spread(open_checkpoint(folder), encoder_config(**ADD, position="rotary")) == 0, "which share no keys"
    untrained = Checkpoint(tmp_path, {}, {}, missing="not trained")
    assert key_spread(untrained, encoder_config(**ADD)) == 0


AT = "layers.0.attention"


@pytest.mark.parametrize("attention", ["mha", "sha", "mqa", "skv", "el_att", "mhe_add", "mhe_mul"])
@pytest.mark.parametrize("bias", [False, True])
def test_shapes_are_the_modules_own(attention: str, bias: bool) -> None:
    encoder = encoder_config(attention=attention, attention_bias=bias, head="masked_lm")
    decoder = decoder_config(attention=attention, attention_bias=bias, tie_word_embeddings=False, position="rotary")
    classifier = encoder_config(attention=attention, head="classifier", num_labels=3)
    pair = pair_config(attention=attention, attention_bias=bias, num_decoder_layers=2)
    for config in (pair, encoder, decoder, classifier):
        own = {name: tuple(value.shape) for name, value in tiny_mhe(config).named_parameters()}
        assert parameters(config).shapes == own


def test_a_tables_name_says_how_it_is_stored() -> None:
    stored = {factors: parameters(encoder_config(factors=factors)).shapes for factors in ("e", "1+e")}
    assert stored["e"][f"{AT}.embedding.query"] == stored["1+e"][f"{AT}.factor.query"] == (4, 8)
    assert f"{AT}.factor.query" not in stored["e"]
    assert parameters(encoder_config(attention="mhe_add")).shapes[f"{AT}.embedding.value"] == (4, 8)


def test_what_shrinks_with_heads() -> None:
    config = encoder_config(num_hidden_layers=1)
    spec = elastic_spec(config)
    submodel = spec.from_kinds({"heads": [3]})
    shapes = parameters(config).shapes | folded_shapes(config, AT)
    found = {name: spec.shape_of(name, shape, submodel) for name, shape in shapes.items() if name.startswith(f"{AT}.")}
    assert {name.removeprefix(f"{AT}."): shape for name, shape in found.items()} == {
        "query.weight": (8, 32),
        "key.weight": (8, 32),
        "value.weight": (8, 32),
        "output.weight": (32, 24),
        **{f"embedding.{role}": (3, 8) for role in ("query", "key", "value")},
        "folded.query": (3, 8),
        "folded.output": (32, 24),
        "folded.queries.weight": (24, 32),
        **{f"expanded.{role}.weight": (24, 32) for role in ("query", "key", "value")},
    }


def test_folds_of_mhe_add_have_biases() -> None:
    shapes = folded_shapes(encoder_config(attention="mhe_add"), "a")
    assert shapes["a.folded.key"] == (8, 32)
    assert shapes["a.folded.queries.bias"] == shapes["a.expanded.value.bias"] == (32,)
    assert folded_slices(encoder_config(attention="mhe_add"), "a", "h")["a.folded.key"] is None
    assert folded_shapes(encoder_config(attention="mqa"), "a") == {}


def test_groups_of_the_papers_tables() -> None:
    assert parameter_group("layers.0.attention.query.weight") == "attention q/k/v"
    assert parameter_group("layers.0.attention.factor.value") == "attention q/k/v"
    assert parameter_group("layers.0.attention.output.weight") == "attention output"
    assert parameter_group("decoder.layers.0.cross_attention.output.weight") == "attention output"
    assert parameter_group("decoder.layers.0.cross_attention.embedding.key") == "attention q/k/v"
    assert parameter_group("decoder.layers.0.cross_attention_norm.weight") is None
    assert parameter_group("layers.0.attention.query.bias") is None
    assert parameter_group("layers.0.ffn.up.weight") is None
