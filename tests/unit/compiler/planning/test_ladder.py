from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.compiler.planning.ladder import PROMOTION_ORDERS, in_every_precision, ladder, promoted
from nestforge.compiler.planning.levels import levels
from nestforge.elastic import BITS, Axis, ElasticSpec
from nestforge.profiles.device_profile import PromotionOrder
from support.bare_encoder import encoder


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


@pytest.mark.parametrize("order", PROMOTION_ORDERS)
@pytest.mark.parametrize(("layers", "rungs"), [(12, 37), (16, 49), (24, 73)])
def test_rungs_of_the_papers_depths(layers: int, rungs: int, order: PromotionOrder) -> None:
    assert len(ladder(levels(encoder(layers, ffn=512, heads=0, nested=True).spec, None, 64), order)) == rungs


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


def test_the_order_of_a_rung() -> None:
    steps = levels(encoder(layers=6, ffn=64, heads=0).spec, {"ffn": [0.5, 1]}, 8)
    third = {order: ladder(steps, order)[3].id for order in PROMOTION_ORDERS}
    assert third == {
        "increasing": "ffn32x3_64x3",
        "decreasing": "ffn64x3_32x3",
        "up-down": "ffn32x2_64x3_32x1",
        "down-up": "ffn64x1_32x3_64x2",
    }


def test_rungs_in_every_precision_go_from_narrow_to_wide() -> None:
    plain = encoder(layers=1).spec
    spec = ElasticSpec((*plain.axes, Axis(BITS, 32, (4, 16, 32))), ())
    rungs = ladder(levels(spec, {"ffn": [0.5, 1]}, 8))
    assert [rung.id for rung in rungs] == ["ffn128-heads4", "ffn256-heads4"], "levels move no precision"
    assert [rung.id for rung in in_every_precision(rungs)] == [
        f"ffn{width}-heads4{bits}" for width in (128, 256) for bits in ("-bits4", "-bits16", "")
    ]


def test_one_precision_leaves_the_rungs_alone() -> None:
    rungs = ladder(levels(encoder(layers=1).spec, {"ffn": [0.5, 1]}, 8))
    assert in_every_precision(rungs) == rungs
