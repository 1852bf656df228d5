from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.planning.variants import chosen_variants
from nestforge.errors import PlanError
from nestforge.exporters.families.mhe.forms import (
    CROSS,
    DECODER,
    ENCODER,
    cached_form,
    cached_heads,
    held_forms,
)
from nestforge.exporters.source import open_source
from support.tiny_compile import board
from support.tiny_mhe import FAR, decoder_config, encoder_config, pair_config, save_tiny_mhe, save_tiny_pair


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
        assert cached is not None
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
