"""Labels: short, the same whatever budgets choose, and one for every submodel."""

from __future__ import annotations

from dataclasses import replace

from nestforge.compiler.planning.labels import labelled, letters, rung_labels
from nestforge.compiler.planning.levels import levels
from nestforge.elastic import BITS, Axis
from nestforge.profiles.load_profile import load_profile
from support.bare_encoder import encoder

PROFILE = load_profile("laptop-x86")


def test_rungs_count_the_layers_that_were_promoted() -> None:
    steps = levels(encoder(layers=3).spec, {"ffn": [0.25, 0.5, 1]}, 8)
    labels = rung_labels(steps, PROFILE)
    expected = [(one,) for one in ("25%", "25%+1", "25%+2", "50%", "50%+1", "50%+2", "100%")]
    assert list(labels.values()) == expected
    other_order = rung_labels(steps, replace(PROFILE, promotion_order="decreasing"))
    assert list(other_order.values()) == expected
    found = labelled("50%+1", labels)
    assert found is not None
    assert found.by_kind()["ffn"] == [128, 128, 256]
    assert labelled("XL", labels) is None


def test_another_precision_than_the_widest_is_in_the_label() -> None:
    spec = encoder(layers=2).spec
    spec = replace(spec, axes=(*spec.axes, Axis(BITS, 32, (8, 32))))
    profile = replace(PROFILE, precisions=("fp32", "int8"))
    labels = rung_labels(levels(spec, {"ffn": [0.5, 1]}, 8), profile)
    names = ["50%.int8", "50%", "50%+1.int8", "50%+1", "100%.int8", "100%"]
    assert [own for (own,) in labels.values()] == names


def test_what_was_asked_for_beside_the_ladder_gets_letters_in_that_order() -> None:
    spec = encoder(layers=1, ffn=64).spec
    many = letters(spec.submodel({"layers.0.ffn": width}) for width in range(1, 31))
    assert [own for (own,) in many.values()][:3] == ["a", "b", "c"]
    assert [own for (own,) in many.values()][25:28] == ["z", "aa", "ab"]
