from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.compiler.planning.levels import (
    PROMOTION_ORDERS,
    Level,
    in_every_precision,
    ladder,
    letters,
    levels,
    promoted,
    read_assignment,
    rung_labels,
    unusual,
)
from nestforge.elastic import Axis, ElasticSpec
from nestforge.errors import PlanError
from nestforge.profiles.device_profile import DeviceProfile, PromotionOrder
from nestforge.profiles.load_profile import load_profile
from support.bare_encoder import encoder


def spec_of(layers: int = 2, ffn: int = 1536, heads: int = 12, nested: bool = False) -> ElasticSpec:
    axes = [Axis(f"layers.{i}.{kind}", size) for i in range(layers) for kind, size in (("ffn", ffn), ("heads", heads))]
    return ElasticSpec(tuple(axes), (), nested)


def test_ranked_model_goes_in_even_steps() -> None:
    assert [(level.label, level.submodel.id) for level in levels(spec_of(), None, 64)] == [
        ("S", "ffn384-heads3"),
        ("M", "ffn768-heads6"),
        ("L", "ffn1152-heads9"),
        ("XL", "ffn1536-heads12"),
    ]


def test_nested_model_goes_in_powers_of_two() -> None:
    found = [level.submodel.by_kind()["ffn"][0] for level in levels(spec_of(ffn=4096, nested=True), None, 64)]
    assert found == [512, 1024, 2048, 4096]


def test_kind_left_out_stays_full_and_other_counts_are_labelled_in_percent() -> None:
    found = levels(spec_of(), {"ffn": [0.125, 0.5, 1]}, 8)
    assert [(level.label, level.submodel.id) for level in found] == [
        ("12.5%", "ffn192-heads12"),
        ("50%", "ffn768-heads12"),
        ("100%", "ffn1536-heads12"),
    ]


def test_rounding_is_nearest_at_least_one_and_stated() -> None:
    small, half, full = levels(spec_of(layers=3, ffn=100, heads=5), {"ffn": [0.01, 0.4, 1], "heads": [0.1, 0.5, 1]}, 16)
    assert [small.submodel.id, half.submodel.id, full.submodel.id] == ["ffn16-heads1", "ffn48-heads3", "ffn100-heads5"]
    assert half.rounding == (
        "40%: ffn 40 of 100 rounded to 48 (a multiple of 16)",
        "40%: heads 2.5 of 5 rounded to 3 (whole steps)",
    )
    assert full.rounding == ()


@given(
    st.integers(1, 4096),
    st.integers(1, 64),
    st.sampled_from([8, 16, 64]),
    st.lists(st.integers(1, 99), unique=True, max_size=6).map(lambda percent: [each / 100 for each in sorted(percent)]),
)
def test_levels_never_shrink_and_end_universal(ffn: int, heads: int, multiple: int, steps: list[float]) -> None:
    spec = spec_of(1, ffn, heads)
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


RISING = "levels: ffn: expected fractions that increase from above 0 to 1, got "
APART = "expected fractions that lead to different values"


@pytest.mark.parametrize(
    ("spec", "fractions", "message"),
    [
        (spec_of(), {}, "levels: expected fractions for at least one of ffn, heads, got none"),
        (spec_of(), {"fnn": [1]}, "levels: this model has no axis kind 'fnn'; did you mean 'ffn'?"),
        (spec_of(), {"ffn": []}, f"{RISING}[]"),
        (spec_of(), {"ffn": [0.5, 0.5, 1]}, f"{RISING}[0.5, 0.5, 1]"),
        (spec_of(), {"ffn": [0.5, 0.75]}, f"{RISING}[0.5, 0.75]"),
        (spec_of(), {"ffn": [0, 1]}, f"{RISING}[0, 1]"),
        (spec_of(), {"ffn": [float("nan"), 1]}, f"{RISING}[nan, 1]"),
        (
            spec_of(),
            {"ffn": [0.5, 1], "heads": [1]},
            "levels: expected equally many fractions for every axis kind, but ffn has 2, heads has 1",
        ),
        (spec_of(), {"ffn": [0.5, 0.5 + 1e-9, 1]}, f"levels: ffn 0.5 and ffn 0.5 are both 50%; {APART}"),
        (
            choices(depth=(2, 4, 6)),
            {"depth": [0.3, 0.35, 1]},
            f"levels: depth 0.3 and depth 0.35 are both depth2; {APART}",
        ),
        (
            choices(reduction=(8, 4, 1)),
            {"reduction": [0.25, 0.3, 1]},
            f"levels: reduction 0.25 and reduction 0.3 are both reduction4; {APART}",
        ),
    ],
)
def test_fractions_that_are_refused(spec: ElasticSpec, fractions: dict[str, list[float]], message: str) -> None:
    with pytest.raises(PlanError) as failure:
        levels(spec, fractions, 8)
    assert str(failure.value) == message


def test_last_layers_are_promoted_first_and_all_kinds_together() -> None:
    spec = encoder(layers=3).spec
    rungs = ladder(levels(spec, {"ffn": [0.25, 0.5, 1], "heads": [0.25, 0.5, 1]}, 8))
    assert [rung.id for rung in rungs] == [
        "ffn64-heads1",
        "ffn64x2_128x1-heads1x2_2x1",
        "ffn64x1_128x2-heads1x1_2x2",
        "ffn128-heads2",
        "ffn128x2_256x1-heads2x2_4x1",
        "ffn128x1_256x2-heads2x1_4x2",
        "ffn256-heads4",
    ]


def test_axis_outside_the_layers_moves_with_the_full_level() -> None:
    spec = ElasticSpec((Axis("rank", 4), Axis("layers.0.ffn", 16), Axis("layers.1.ffn", 16)), ())
    rungs = ladder(levels(spec, {"rank": [0.5, 1], "ffn": [0.5, 1]}, 8))
    assert [rung.id for rung in rungs] == ["rank2-ffn8", "rank2-ffn8x1_16x1", "rank4-ffn16"]


def test_layers_behind_the_depth_make_no_rungs() -> None:
    axes = (Axis("depth", 4, (2, 4)), *(Axis(f"layers.{layer}.ffn", 16) for layer in range(4)))
    steps = levels(ElasticSpec(axes, ()), {"depth": [0.5, 1], "ffn": [0.5, 1]}, 8)
    behind = "ffn8x{}_16x{}"
    assert [rung.id for rung in ladder(steps, "decreasing")] == [
        "depth2-" + behind.format(2, 2),
        "depth2-ffn16x1_8x1_16x2",
        "depth2-ffn16",
        "depth4-ffn16",
    ]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("increasing", ["....", "...#", "..##", ".###", "####"]),
        ("decreasing", ["....", "#...", "##..", "###.", "####"]),
        ("up-down", ["....", "..#.", ".##.", ".###", "####"]),
        ("down-up", ["....", "...#", "#..#", "#.##", "####"]),
    ],
)
def test_which_layers_each_order_promotes(order: PromotionOrder, expected: list[str]) -> None:
    raised = [promoted(range(4), count, order) for count in range(5)]
    assert ["".join("#" if layer in layers else "." for layer in range(4)) for layers in raised] == expected


@given(st.integers(1, 24), st.integers(1, 5), st.sampled_from(PROMOTION_ORDERS))
def test_every_ladder_of_every_order_rises(layers: int, count: int, order: PromotionOrder) -> None:
    source = encoder(layers, ffn=640, heads=10)
    fractions = [(i + 1) / count for i in range(count)]
    steps = levels(source.spec, {"ffn": fractions, "heads": fractions}, 8)
    rungs = ladder(steps, order)
    assert len(rungs) == (count - 1) * layers + 1
    parameters = [source.parameters(rung) for rung in rungs]
    assert parameters == sorted(set(parameters))
    assert parameters == [source.parameters(rung) for rung in ladder(steps)], "of one size whatever the order"
    widths = [level.submodel["layers.0.ffn"] for level in steps]
    for rung in rungs:
        used = sorted({widths.index(value) for value in rung.by_kind()["ffn"]})
        assert used in ([used[0]], [used[0], used[0] + 1]), "adjacent levels alone"


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=8), st.sampled_from(PROMOTION_ORDERS))
def test_layers_of_different_sizes_rise_too(sizes: list[int], order: PromotionOrder) -> None:
    spec = ElasticSpec(tuple(Axis(f"layers.{i}.ffn", size) for i, size in enumerate(sizes)), (), trained_nested=True)
    rungs = ladder(levels(spec, None, 8), order)
    totals = [sum(value for _, value in rung.values) for rung in rungs]
    assert totals == sorted(totals)
    for smaller, larger in pairwise(rungs):
        assert all(smaller[axis.name] <= larger[axis.name] for axis in spec.axes), "no layer is ever demoted"


def test_the_highest_precision_of_a_rung_comes_last() -> None:
    rungs = ladder(levels(encoder(layers=1).spec, {"ffn": [0.5, 1]}, 8))
    assert [rung.id for rung in in_every_precision(rungs, ["fp16", "int4", "fp32"])] == [
        f"ffn{width}-heads4{precision}" for width in (128, 256) for precision in (".int4", ".fp16", "")
    ]
    assert in_every_precision(rungs, ["int8"]) == rungs, "one precision leaves the rungs alone"


PROFILE = load_profile("laptop-x86")


def test_rungs_count_the_layers_that_were_promoted() -> None:
    steps = levels(encoder(layers=3).spec, {"ffn": [0.25, 0.5, 1]}, 8)
    labels = rung_labels(steps, PROFILE)
    expected = [(one,) for one in ("25%", "25%+1", "25%+2", "50%", "50%+1", "50%+2", "100%")]
    assert list(labels.values()) == expected
    other_order = rung_labels(steps, replace(PROFILE, promotion_order="decreasing"))
    assert list(other_order.values()) == expected
    found = next(rung for rung, own in labels.items() if "50%+1" in own)
    assert found.by_kind()["ffn"] == [128, 128, 256]


def test_what_was_asked_for_beside_the_ladder_gets_letters_in_that_order() -> None:
    spec = encoder(layers=1, ffn=64).spec
    many = letters(spec.submodel({"layers.0.ffn": width}) for width in range(1, 31))
    assert [own for (own,) in many.values()][:3] == ["a", "b", "c"]
    assert [own for (own,) in many.values()][25:28] == ["z", "aa", "ab"]


SPEC = encoder(layers=4, ffn=200, heads=4, nested=True).spec


def steps(spec: ElasticSpec = SPEC, multiple: int = 8) -> tuple[Level, ...]:
    return levels(spec, {"ffn": [0.125, 0.25, 0.5, 1]}, multiple)


def on(multiple: int) -> DeviceProfile:
    return replace(load_profile("laptop-x86"), width_multiple=multiple)


def test_a_label_names_its_rung_and_other_names_list_the_labels() -> None:
    rungs = ladder(steps())
    named = {name: read_assignment(SPEC, name, steps(), on(8)) for name in ("S", "S+1", "M+3", "XL")}
    assert named == {"S": rungs[0], "S+1": rungs[1], "M+3": rungs[7], "XL": rungs[-1]}
    with pytest.raises(
        PlanError,
        match=r"cannot read 'XXL'; expected ids like ffn200-heads4, or labels: S, (\S+, ){4}\.\.\., (\S+, ){4}XL$",
    ):
        read_assignment(SPEC, "XXL", steps(), on(8))


def test_a_label_may_say_its_precision_as_an_id_may() -> None:
    spec, profile = replace(SPEC, precisions=("fp32", "int8")), replace(on(8), precisions=("fp32", "int8"))
    named = [read_assignment(spec, name, steps(), profile) for name in ("M", "M.fp32", "M.int8")]
    assert named[0] == named[1] == replace(named[2], precision=None)
    with pytest.raises(
        PlanError, match=r"submodel 'M\.fp16-weights': unknown precision 'fp16-weights'; expected one of"
    ):
        read_assignment(spec, "M.fp16-weights", steps(), profile)


def test_multiples_levels_and_full_widths_are_taken() -> None:
    # 24, 48 and 104 are levels rounded to multiples of 8; 200 is full.
    for text in ("ffn24x2_48x1_104x1-heads4", "ffn200", "ffn16_72_120_200-heads1x2_3x2"):
        assert read_assignment(SPEC, text, steps(), on(8)) == SPEC.parse(text)
    odd = encoder(layers=2, ffn=100, heads=0).spec
    assert read_assignment(odd, "ffn64_100", steps(odd, 64), on(64)).by_kind() == {"ffn": [64, 100]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ffn24x2_50x2-heads4",
            "submodel 'ffn24x2_50x2-heads4': layers.2.ffn 50 is neither a multiple of 8, as the profile asks, nor the "
            "width of a level; nearest: 48 and 56",
        ),
        (
            "ffn5",
            "submodel 'ffn5': layers.0.ffn 5 is neither a multiple of 8, as the profile asks, nor the width of a "
            "level; nearest: 8",
        ),
        (
            "ffn199",
            "submodel 'ffn199': layers.0.ffn 199 is neither a multiple of 8, as the profile asks, nor the width of a "
            "level; nearest: 192 and 200",
        ),
        ("ffn24x3", "axis kind ffn: expected 4 values, one per layer, got 3"),
        ("ffn208", "axis layers.0.ffn: expected 1..200, got 208"),
        ("heads3x3_5x1", "axis layers.3.heads: expected 1..4, got 5"),
        ("ffn24-fnn24", "unknown axis kind 'fnn': this model has ffn, heads"),
    ],
)
def test_assignments_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError) as failure:
        read_assignment(SPEC, text, steps(), on(8))
    assert str(failure.value) == message


def test_a_width_above_the_last_multiple_names_the_full_size() -> None:
    odd = encoder(layers=1, ffn=100, heads=0).spec
    with pytest.raises(PlanError, match=r"nearest: 96 and 100$"):
        read_assignment(odd, "ffn99", steps(odd), on(8))


def test_rungs_are_not_unusual_but_for_their_order() -> None:
    assert list(unusual(ladder(steps()), steps())) == []
    for order in PROMOTION_ORDERS:
        assert all("shrinks with depth" in note for note in unusual(ladder(steps(), order), steps()))


def test_what_is_unusual() -> None:
    cases = {
        "ffn48x2_24x2": ["ffn48x2_24x2-heads4: ffn shrinks with depth, which rungs of the increasing ladder never do"],
        "ffn24x2_104x2": ["ffn24x2_104x2-heads4: ffn mixes levels S and L and skips M"],
        "ffn24x2_200x2": ["ffn24x2_200x2-heads4: ffn mixes levels S and XL and skips M and L"],
        "ffn24_48_104_200": [],
        "ffn16x1_24x3": ["ffn16x1_24x3-heads4: on no level: layers.0.ffn 16"],
        "ffn200x1_24x3": [
            "ffn200x1_24x3-heads4: ffn shrinks with depth, which rungs of the increasing ladder never do",
            "ffn200x1_24x3-heads4: ffn mixes levels S and XL and skips M and L",
        ],
    }
    assert {text: list(unusual([SPEC.parse(text)], steps())) for text in cases} == cases


def test_levels_that_share_a_width_skip_nothing() -> None:
    spec = encoder(layers=2, ffn=24, heads=0).spec
    shared = levels(spec, {"ffn": [0.125, 0.25, 0.5, 1]}, 8)  # 8, 8, 16, 24
    assert list(unusual([spec.parse("ffn8_16")], shared)) == []


def test_layers_behind_the_depth_say_nothing() -> None:
    axes = (Axis("depth", 4, (2, 4)), *(Axis(f"layers.{layer}.ffn", 64) for layer in range(4)))
    spec = ElasticSpec(axes, ())
    small = levels(spec, {"depth": [0.25, 0.5, 1], "ffn": [0.25, 0.5, 1]}, 8)
    assert list(unusual([spec.parse("depth2-ffn16")], small)) == []
