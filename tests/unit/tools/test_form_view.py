"""The forms that ``inspect MODEL`` and ``plan`` show, of a model whose forms differ by submodel and bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from nestforge.elastic import Axis, Bucket, ElasticSpec, Submodel
from nestforge.errors import PlanError
from nestforge.profiles.load_profile import load_profile
from nestforge.tools.form_view import FormView, form_facts, form_views, print_forms
from nestforge.workload import Op

SPEC = ElasticSpec((Axis("capacity", 100, (50, 100)), Axis("sequence", 8, (4, 8))), ())


class Formed:
    """``sum`` is cheapest in ``few`` products up to 4 tokens, ``copy`` always ``by_index``."""

    spec = SPEC

    def forms(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, Mapping[str, Sequence[Op]]]:
        few, many = Op("few", "gemm", 10**6 * bucket.tokens, 0, 0), Op("many", "gemm", 10**6 * 6, 0, 0)
        copy = {"by_index": [Op("copy", "gather", 0, 0, 8)], "one_hot": [many]}
        return {"sum": {"many": [many], "few": [few]}, "copy": copy}

    def workload(self, submodel: Submodel, bucket: Bucket, forms: Mapping[str, str] | None = None) -> Sequence[Op]:
        raise NotImplementedError


class OfOneForm(Formed):
    def forms(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, Mapping[str, Sequence[Op]]]:
        return {}


PROFILE = replace(load_profile("laptop-x86"), buckets=(Bucket(1, 4), Bucket(1, 8)))
SUBMODELS = [SPEC.parse("capacity50-sequence8"), SPEC.parse("capacity100-sequence4")]


def test_every_submodel_at_its_own_buckets() -> None:
    views = form_views(Formed(), SUBMODELS, PROFILE)
    few, many = ({"sum": form, "copy": "by_index"} for form in ("few", "many"))
    own = [FormView("capacity100-sequence4", Bucket(1, 4).label, few)]
    at_8 = SUBMODELS[0].at(Bucket(1, 8)).label
    assert FormView("capacity50-sequence8", at_8, many) in views
    assert [view for view in views if view.submodel == "capacity100-sequence4"] == own


def test_what_all_share_is_a_fact_and_the_rest_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = ({"sum": form, "copy": "by_index"} for form in ("few", "many"))
    views = [FormView("a", "b1-s4", few), FormView("a", "b1-s8", many)]
    assert form_facts(views) == [("form of copy", "by_index")]
    print_forms(views)
    assert capsys.readouterr().out.splitlines() == [
        "",
        "submodel  bucket  form of sum",
        "a         b1-s4   few",
        "a         b1-s8   many",
    ]
    assert form_facts(views[:1]) == [("form of sum", "few"), ("form of copy", "by_index")]
    print_forms(views[:1])
    assert capsys.readouterr().out == ""


def test_most_models_have_one_form_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    views = form_views(OfOneForm(), SUBMODELS, PROFILE)
    assert views == ()
    assert form_facts(views) == []
    print_forms(views)
    assert capsys.readouterr().out == ""


def test_a_form_that_the_profile_asks_for_must_exist() -> None:
    assert {view.forms["sum"] for view in form_views(Formed(), SUBMODELS, replace(PROFILE, forms={"sum": "few"}))} == {
        "few"
    }
    with pytest.raises(PlanError, match="form sum=none: expected one of many, few"):
        form_views(Formed(), SUBMODELS, replace(PROFILE, forms={"sum": "none"}))
