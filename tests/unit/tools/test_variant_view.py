"""The variants that ``inspect MODEL`` and ``plan`` show: facts where all have the same one, else a table."""

from __future__ import annotations

import pytest
from nestforge.compiler.planning.variants import VariantView
from nestforge.runtime.summary.short_names import ShortNames
from nestforge.tools.variant_view import print_variants, shared_variants

NAMES = ShortNames({"ffn8": "a"})


def test_what_all_share_is_a_fact_and_the_rest_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = ({"sum": variant, "copy": "by_index"} for variant in ("few", "many"))
    views = [VariantView("ffn8", "b1-s4", few), VariantView("ffn8", "b1-s8", many)]
    assert shared_variants(views) == [("variant of copy", "by_index")]
    print_variants(views, NAMES)
    assert capsys.readouterr().out.splitlines() == [
        "",
        "submodel  bucket  variant of sum",
        "a         b1-s4   few",
        "a         b1-s8   many",
    ]
    assert shared_variants(views[:1]) == [("variant of sum", "few"), ("variant of copy", "by_index")]
    print_variants(views[:1], NAMES)
    assert capsys.readouterr().out == ""


def test_most_models_have_one_variant_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert shared_variants(()) == []
    print_variants((), NAMES)
    assert capsys.readouterr().out == ""
