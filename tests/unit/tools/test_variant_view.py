"""The variants that ``inspect MODEL`` and ``plan`` show, of a model whose variants differ by submodel and bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from nestforge.elastic import Axis, Bucket, ElasticSpec, Submodel
from nestforge.errors import PlanError
from nestforge.profiles.load_profile import load_profile
from nestforge.tools.variant_view import VariantView, print_variants, shared_variants, variant_views
from nestforge.workload import Op

SPEC = ElasticSpec((Axis("capacity", 100, (50, 100)), Axis("sequence", 8, (4, 8))), ())


class HasVariants:
    """``sum`` is cheapest in ``few`` products up to 4 tokens, ``copy`` always ``by_index``."""

    spec = SPEC

    def variants(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, Mapping[str, Sequence[Op]]]:
        few, many = Op("few", "gemm", 10**6 * bucket.tokens, 0, 0), Op("many", "gemm", 10**6 * 6, 0, 0)
        copy = {"by_index": [Op("copy", "gather", 0, 0, 8)], "one_hot": [many]}
        return {"sum": {"many": [many], "few": [few]}, "copy": copy}

    def workload(self, submodel: Submodel, bucket: Bucket, variants: Mapping[str, str] | None = None) -> Sequence[Op]:
        raise NotImplementedError


class OfOneVariant(HasVariants):
    def variants(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, Mapping[str, Sequence[Op]]]:
        return {}


PROFILE = replace(load_profile("laptop-x86"), buckets=(Bucket(1, 4), Bucket(1, 8)))
SUBMODELS = [SPEC.parse("capacity50-sequence8"), SPEC.parse("capacity100-sequence4")]


def test_every_submodel_at_its_own_buckets() -> None:
    views = variant_views(HasVariants(), SUBMODELS, PROFILE)
    few, many = ({"sum": variant, "copy": "by_index"} for variant in ("few", "many"))
    own = [VariantView("capacity100-sequence4", Bucket(1, 4).label, few)]
    at_8 = SUBMODELS[0].at(Bucket(1, 8)).label
    assert VariantView("capacity50-sequence8", at_8, many) in views
    assert [view for view in views if view.submodel == "capacity100-sequence4"] == own


def test_what_all_share_is_a_fact_and_the_rest_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = ({"sum": variant, "copy": "by_index"} for variant in ("few", "many"))
    views = [VariantView("a", "b1-s4", few), VariantView("a", "b1-s8", many)]
    assert shared_variants(views) == [("variant of copy", "by_index")]
    print_variants(views)
    assert capsys.readouterr().out.splitlines() == [
        "",
        "submodel  bucket  variant of sum",
        "a         b1-s4   few",
        "a         b1-s8   many",
    ]
    assert shared_variants(views[:1]) == [("variant of sum", "few"), ("variant of copy", "by_index")]
    print_variants(views[:1])
    assert capsys.readouterr().out == ""


def test_most_models_have_one_form_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    views = variant_views(OfOneVariant(), SUBMODELS, PROFILE)
    assert views == ()
    assert shared_variants(views) == []
    print_variants(views)
    assert capsys.readouterr().out == ""


def test_a_form_that_the_profile_asks_for_must_exist() -> None:
    assert {
        view.forms["sum"] for view in variant_views(HasVariants(), SUBMODELS, replace(PROFILE, variants={"sum": "few"}))
    } == {"few"}
    with pytest.raises(PlanError, match="variant sum=none: expected one of many, few"):
        variant_views(HasVariants(), SUBMODELS, replace(PROFILE, variants={"sum": "none"}))
