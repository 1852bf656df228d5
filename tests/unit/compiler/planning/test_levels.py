from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.compiler.planning.levels import levels
from nestforge.elastic import Axis, ElasticSpec
from nestforge.errors import PlanError


def encoder(layers: int = 2, ffn: int = 1536, heads: int = 12, nested: bool = False) -> ElasticSpec:
    axes = [Axis(f"layers.{i}.{kind}", size) for i in range(layers) for kind, size in (("ffn", ffn), ("heads", heads))]
    return ElasticSpec(tuple(axes), (), nested)


def test_ranked_model_goes_in_even_steps() -> None:
    assert [(level.label, level.submodel.id) for level in levels(encoder(), None, 64)] == [
        ("S", "ffn384-heads3"),
        ("M", "ffn768-heads6"),
        ("L", "ffn1152-heads9"),
        ("XL", "ffn1536-heads12"),
    ]


def test_nested_model_goes_in_powers_of_two() -> None:
    found = [level.submodel.by_kind()["ffn"][0] for level in levels(encoder(ffn=4096, nested=True), None, 64)]
    assert found == [512, 1024, 2048, 4096]


def test_kind_left_out_stays_full_and_other_counts_are_labelled_in_percent() -> None:
    found = levels(encoder(), {"ffn": [0.125, 0.5, 1]}, 8)
    assert [(level.label, level.submodel.id) for level in found] == [
        ("12.5%", "ffn192-heads12"),
        ("50%", "ffn768-heads12"),
        ("100%", "ffn1536-heads12"),
    ]


def test_rounding_is_nearest_at_least_one_and_stated() -> None:
    small, half, full = levels(encoder(layers=3, ffn=100, heads=5), {"ffn": [0.01, 0.4, 1], "heads": [0.1, 0.5, 1]}, 16)
    assert [small.submodel.id, half.submodel.id, full.submodel.id] == ["ffn16-heads1", "ffn48-heads3", "ffn100-heads5"]
    assert half.rounding == (
        "40%: ffn 40 of 100 rounded to 48 (a multiple of 16)",
        "40%: heads 2.5 of 5 rounded to 3 (whole steps)",
    )
    assert full.rounding == ()


def test_width_below_one_multiple_stays_whole() -> None:
    assert [level.submodel["layers.0.ffn"] for level in levels(encoder(ffn=24), None, 64)] == [24, 24, 24, 24]


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({}, "levels: expected fractions for at least one of ffn, heads, got none"),
        ({"fnn": [1]}, "levels: this model has no axis kind 'fnn'; did you mean 'ffn'?"),
        ({"ffn": []}, "levels: ffn: expected fractions that increase from above 0 to 1, got []"),
        ({"ffn": [0.5, 0.5, 1]}, "levels: ffn: expected fractions that increase from above 0 to 1, got [0.5, 0.5, 1]"),
        ({"ffn": [0.5, 0.75]}, "levels: ffn: expected fractions that increase from above 0 to 1, got [0.5, 0.75]"),
        ({"ffn": [0, 1]}, "levels: ffn: expected fractions that increase from above 0 to 1, got [0, 1]"),
        ({"ffn": [float("nan"), 1]}, "levels: ffn: expected fractions that increase from above 0 to 1, got [nan, 1]"),
        (
            {"ffn": [0.5, 1], "heads": [1]},
            "levels: expected equally many fractions for every axis kind, but ffn has 2, heads has 1",
        ),
    ],
)
def test_refusals(fractions: dict[str, list[float]], message: str) -> None:
    with pytest.raises(PlanError) as failure:
        levels(encoder(), fractions, 8)
    assert str(failure.value) == message


@given(
    st.integers(1, 4096),
    st.integers(1, 64),
    st.sampled_from([8, 16, 64]),
    st.lists(st.integers(1, 99), unique=True, max_size=6).map(lambda percent: [each / 100 for each in sorted(percent)]),
)
def test_levels_never_shrink_and_end_universal(ffn: int, heads: int, multiple: int, steps: list[float]) -> None:
    spec = encoder(1, ffn, heads)
    found = levels(spec, {"ffn": [*steps, 1.0], "heads": [*steps, 1.0]}, multiple)
    assert found[-1].submodel == spec.universal()
    for kind, size in (("ffn", ffn), ("heads", heads)):
        values = [level.submodel[f"layers.0.{kind}"] for level in found]
        assert values == sorted(values)
        assert values[0] >= 1
        assert all(kind == "heads" or value % multiple == 0 or value == size for value in values)


def choices(**sizes: tuple[int, ...]) -> ElasticSpec:
    return ElasticSpec(tuple(Axis(kind, values[-1], values) for kind, values in sizes.items()), ())


def test_kinds_with_choices_are_labelled_by_their_values_whichever_of_them_move() -> None:
    spec = choices(capacity=(25, 50, 100), group=(16, 64))
    assert [level.label for level in levels(spec, {"capacity": [0.5, 1]}, 8)] == ["capacity50", "capacity100"]
    both = levels(spec, {"capacity": [0.5, 1], "group": [0.25, 1]}, 8)
    assert [level.label for level in both] == ["capacity50-group16", "capacity100-group64"]


def test_of_kinds_with_different_numbers_of_choices_the_most_finely_stepped_move() -> None:
    found = levels(choices(capacity=(25, 50, 100), group=(16, 64), sequence=(4, 8, 16)), None, 8)
    assert [level.submodel.id for level in found] == [
        "capacity25-group64-sequence4",
        "capacity50-group64-sequence8",
        "capacity100-group64-sequence16",
    ]


def test_a_choice_that_no_fraction_of_the_size_hits_exactly_is_not_called_rounded() -> None:
    assert 29 / 100 * 100 != 29
    low, _ = levels(choices(capacity=(29, 100)), {"capacity": [29 / 100, 1]}, 8)
    assert (low.submodel.id, low.rounding) == ("capacity29", ())
    between, _ = levels(choices(capacity=(25, 50, 100)), {"capacity": [0.4, 1]}, 8)
    assert between.rounding == ("capacity50: capacity 40 of 100 rounded to 50 (a choice)",)


def test_choices_that_fall_are_levels_from_the_one_that_keeps_least() -> None:
    spec = ElasticSpec((Axis("layers.0.ffn", 64), Axis("coda.reduction", 1, (8, 3, 1))), ())
    assert [(level.label, level.submodel.id) for level in levels(spec, None, 8)] == [
        ("coda.reduction8", "ffn64-coda.reduction8"),
        ("coda.reduction3", "ffn64-coda.reduction3"),
        ("coda.reduction1", "ffn64-coda.reduction1"),
    ]
    half, whole = levels(spec, {"ffn": [0.5, 1], "coda.reduction": [0.25, 1]}, 8)
    assert (half.submodel.id, whole.submodel.id) == ("ffn32-coda.reduction3", "ffn64-coda.reduction1")
    assert half.rounding == ("50%: coda.reduction 4 rounded to 3 (a choice)",)


def test_a_choice_is_the_nearest_by_what_it_keeps() -> None:
    spec = ElasticSpec((Axis("coda.reduction", 1, (8, 2, 1)),), ())
    most, _ = levels(spec, {"coda.reduction": [0.7, 1]}, 8)
    assert most.submodel.id == "coda.reduction2"  # half of the tokens is nearer to 0.7 than all, though 1 is to 1 / 0.7


@pytest.mark.parametrize(
    ("spec", "fractions", "message"),
    [
        (
            ElasticSpec((Axis("coda.reduction", 1, (8, 4, 1)),), ()),
            {"coda.reduction": [0.25, 0.3, 1]},
            "levels: coda.reduction 0.25 and coda.reduction 0.3 are both coda.reduction4; expected fractions that lead "
            "to different values",
        ),
        (
            choices(depth=(2, 4, 6)),
            {"depth": [0.3, 0.35, 1]},
            "levels: depth 0.3 and depth 0.35 are both depth2; expected fractions that lead to different values",
        ),
        (
            encoder(),
            {"ffn": [0.5, 0.5 + 1e-9, 1]},
            "levels: ffn 0.5 and ffn 0.5 are both 50%; expected fractions that lead to different values",
        ),
    ],
)
def test_levels_that_could_not_be_told_apart_are_refused(
    spec: ElasticSpec, fractions: dict[str, list[float]], message: str
) -> None:
    with pytest.raises(PlanError) as failure:
        levels(spec, fractions, 8)
    assert str(failure.value) == message
