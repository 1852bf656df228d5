from __future__ import annotations

from dataclasses import replace

import pytest
from nestforge.compiler.planning.assignments import read_assignment, unusual
from nestforge.compiler.planning.ladder import PROMOTION_ORDERS, ladder
from nestforge.compiler.planning.levels import Level, levels
from nestforge.elastic import Axis, ElasticSpec
from nestforge.errors import PlanError
from nestforge.profiles.device_profile import DeviceProfile
from nestforge.profiles.load_profile import load_profile
from support.bare_encoder import encoder

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
def test_refusals(text: str, message: str) -> None:
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
