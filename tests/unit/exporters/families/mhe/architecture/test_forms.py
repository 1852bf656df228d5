from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.compiler.planning.variants import chosen_variants
from nestforge.elastic import Bucket
from nestforge.errors import PlanError
from nestforge.exporters.families.mhe.architecture.forms import cached_form, cached_heads, held_forms
from nestforge.exporters.source import open_source
from support.tiny_compile import board
from support.tiny_mhe import decoder_config, encoder_config, save_tiny_mhe, save_tiny_pair


def test_which_forms_hold() -> None:
    every = ("normal", "shared_scores", "expanded_queries", "expanded", "literal")
    assert held_forms(encoder_config(attention="mhe_add")) == every
    assert held_forms(encoder_config()) == tuple(form for form in every if form != "shared_scores")
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
        ({}, "flash", "expected one of normal, expanded_queries, expanded, literal"),
    ],
)
def test_a_form_that_does_not_hold_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, str], form: str, problem: str
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
        "encoder_attention": "shared_scores",
        "decoder_attention": "literal",
        "cross_attention": "shared_scores",
    }


def test_the_cheapest_form_on_a_device() -> None:
    """Scores shared by all heads save products; of mhe_mul the normal form has the fewest weights and products."""
    for preset, form in (("mhe-add-encoder-base", "shared_scores"), ("mhe-mul-encoder-base", "normal")):
        source = open_source(f"preset:{preset}")
        assert chosen_variants(source, source.spec.universal(), Bucket(1, 512), board()) == {"attention": form}
