"""Buckets, and the axes, slices and submodels of an elastic model."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.elastic import Axis, ElasticSpec, PrefixSlice, Submodel
from nestforge.errors import PlanError

AXES = tuple(Axis(f"layers.{i}.{kind}", size) for i in range(3) for kind, size in (("ffn", 64), ("heads", 4)))
SPEC = ElasticSpec(AXES, (PrefixSlice("up", 0, "layers.1.ffn"), PrefixSlice("query", 0, "layers.1.heads", 8)))


@st.composite
def points(draw: st.DrawFn) -> tuple[ElasticSpec, Submodel]:
    """A spec with any number of layers and kinds, axes of one kind even of different sizes, and a point in it."""
    kinds = draw(st.lists(st.from_regex(r"[a-z][a-z_.]{0,6}", fullmatch=True), min_size=1, max_size=3, unique=True))
    layers = draw(st.integers(1, 6))
    axes = tuple(Axis(f"layers.{i}.{kind}", draw(st.integers(1, 40))) for i in range(layers) for kind in kinds)
    spec = ElasticSpec(axes, ())
    return spec, spec.submodel({axis.name: draw(st.integers(1, axis.size)) for axis in axes})


@given(points())
def test_an_id_names_its_submodel(point: tuple[ElasticSpec, Submodel]) -> None:
    spec, submodel = point
    assert spec.parse(submodel.id) == submodel
    assert spec.from_kinds(submodel.by_kind()) == submodel


@given(points(), st.data())
def test_different_submodels_have_different_ids(point: tuple[ElasticSpec, Submodel], data: st.DataObject) -> None:
    spec, one = point
    other = spec.submodel({axis.name: data.draw(st.integers(1, axis.size)) for axis in spec.axes})
    assert (one.id == other.id) == (one == other)


def test_ids_by_hand() -> None:
    assert SPEC.universal().id == "ffn64-heads4"
    mixed = SPEC.from_kinds({"ffn": [16, 16, 64], "heads": [1, 2, 2]})
    assert mixed.id == "ffn16x2_64x1-heads1x1_2x2"
    assert mixed.by_kind() == {"ffn": [16, 16, 64], "heads": [1, 2, 2]}
    assert not mixed.is_universal
    assert SPEC.parse("ffn16_16_64-heads1_2x2") == mixed


def test_what_an_id_leaves_out_keeps_its_full_size() -> None:
    assert SPEC.parse("heads2") == SPEC.from_kinds({"ffn": [64], "heads": [2]})
    assert SPEC.parse("ffn64") == SPEC.universal()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "submodel '': cannot read ''; expected ids like ffn64-heads4"),
        ("S", "submodel 'S': cannot read 'S'; expected ids like ffn64-heads4"),
        ("ffn", "submodel 'ffn': cannot read 'ffn'; expected ids like ffn64-heads4"),
        ("ffn16-", "submodel 'ffn16-': cannot read ''; expected ids like ffn64-heads4"),
        ("ffn-16", "submodel 'ffn-16': cannot read 'ffn'; expected ids like ffn64-heads4"),
        ("ffn\u0663", "submodel 'ffn\u0663': cannot read 'ffn\u0663'; expected ids like ffn64-heads4"),
        ("ffn16-ffn64", "submodel 'ffn16-ffn64': cannot read 'ffn64'; expected ids like ffn64-heads4"),
        ("rank8", "unknown axis kind 'rank': this model has ffn, heads"),
        ("ffn0", "axis layers.0.ffn: expected 1..64, got 0"),
        ("ffn64_65_64", "axis layers.1.ffn: expected 1..64, got 65"),
        ("heads4-ffn8x2", "axis kind ffn: expected 3 values, one per layer, got 2"),
        ("ffn8x4", "axis kind ffn: expected 3 values, one per layer, got more"),
        ("ffn8x0", "axis kind ffn: expected 3 values, one per layer, got 0"),
        ("ffn8x999999999", "axis kind ffn: expected 3 values, one per layer, got more"),
    ],
)
def test_ids_that_name_nothing(name: str, message: str) -> None:
    with pytest.raises(PlanError) as refusal:
        SPEC.parse(name)
    assert str(refusal.value) == message


def test_an_endless_id_is_refused_briefly() -> None:
    with pytest.raises(PlanError) as refusal:
        SPEC.parse("ffn" + "9" * 100_000)
    assert len(str(refusal.value)) < 300


def test_axes_know_their_layer_and_kind() -> None:
    axis, knob = Axis("layers.11.ffn", 8), Axis("moe.capacity_factor", 4)
    assert (axis.kind, axis.layer) == ("ffn", 11)
    assert (knob.kind, knob.layer) == ("moe.capacity_factor", None)
    assert SPEC.kinds == ["ffn", "heads"]


def test_a_submodel_stays_on_the_axes() -> None:
    assert SPEC.submodel({"layers.1.ffn": 8})["layers.1.ffn"] == 8
    with pytest.raises(PlanError, match=r"^unknown axis 'layers.3.ffn': this model has ffn, heads per layer$"):
        SPEC.submodel({"layers.3.ffn": 8})
    with pytest.raises(PlanError, match=r"^axis layers.2.heads: expected 1..4, got -1$"):
        SPEC.submodel({"layers.2.heads": -1})


def test_shapes_shrink_by_units() -> None:
    submodel = SPEC.from_kinds({"ffn": [64, 16, 64], "heads": [4, 3, 4]})
    assert SPEC.shape_of("up", (64, 32), submodel) == (16, 32)
    assert SPEC.shape_of("query", (32, 32), submodel) == (24, 32)
    assert SPEC.shape_of("norm", (32,), submodel) == (32,)
    assert all(SPEC.shape_of(cut.parameter, (64, 7), SPEC.universal())[1] == 7 for cut in SPEC.slices)


STACKED = ElasticSpec(
    (Axis("moe.experts", 4, (2, 4)), Axis("sequence", 16, (8, 16)), Axis("layers.0.ffn", 8)),
    (
        PrefixSlice("layers.0.moe.up", 0, "moe.experts"),
        PrefixSlice("layers.1.moe.up", 0, "moe.experts"),
        PrefixSlice("up", 0, "layers.0.ffn"),
    ),
    order_followers=tuple(PrefixSlice(f"layers.{i}.moe.router", 0, "moe.experts") for i in (0, 1)),
    per_layer_order=frozenset({"moe.experts"}),
)


def test_layers_that_are_independent_have_an_order_each() -> None:
    first, second, ffn = STACKED.orders
    assert [order.name for order in STACKED.orders] == ["layers.0.moe.experts", "layers.1.moe.experts", "layers.0.ffn"]
    assert [cut.parameter for cut in (*second.slices, *second.followers)] == ["layers.1.moe.up", "layers.1.moe.router"]
    assert (first.axis, ffn.axis) == (STACKED.axes[0], STACKED.axes[2])
    assert ffn.followers == ()


def test_elsewhere_all_slices_of_an_axis_have_one_order() -> None:
    together = ElasticSpec(STACKED.axes, STACKED.slices, order_followers=STACKED.order_followers)
    experts = together.orders[0]
    assert (experts.name, len(experts.slices), len(experts.followers)) == ("moe.experts", 2, 2)
    assert ElasticSpec(STACKED.axes, ()).orders == (), "what slices nothing orders nothing"


def test_followers_keep_every_step() -> None:
    half = STACKED.parse("moe.experts2")
    assert STACKED.shape_of("layers.1.moe.up", (4, 6), half) == (2, 6)
    assert STACKED.shape_of("layers.1.moe.router", (4, 6), half) == (4, 6)


def test_a_submodel_has_its_own_sequence_in_the_place_of_a_buckets() -> None:
    short = STACKED.parse("sequence8")
    assert [short.at(bucket) for bucket in (Bucket(3, 16), Bucket(3, 8))] == [Bucket(3, 8)] * 2
    assert SPEC.universal().at(Bucket(3, 16)) == Bucket(3, 16)


def test_where_choices_fall_a_larger_value_keeps_less() -> None:
    falling, rising = Axis("coda.reduction", 2, (8, 3, 2)), Axis("depth", 12, (3, 6, 12))
    assert (falling.falls, rising.falls, Axis("ffn", 8).falls) == (True, False, False)
    assert [falling.share(value) for value in (8, 3, 2)] == [0.25, 2 / 3, 1.0]
    assert [rising.share(value) for value in (3, 6, 12)] == [0.25, 0.5, 1.0]
    for axis in (falling, rising):
        assert [axis.at(axis.share(value)) for value in axis.choices or ()] == list(axis.choices or ())
    spec = ElasticSpec((falling,), ())
    assert spec.universal().id == "coda.reduction2"
    assert spec.parse("coda.reduction8").is_universal is False
    with pytest.raises(PlanError, match=r"^axis coda\.reduction: expected one of 8, 3, 2, got 1$"):
        spec.parse("coda.reduction1")


@pytest.mark.parametrize("axes", [(), AXES, (Axis("an.int", 8), Axis("layers.0.int", 8))])
def test_an_id_ends_in_a_precision_that_is_not_the_highest(axes: tuple[Axis, ...]) -> None:
    spec = ElasticSpec(axes, (), precisions=("fp32", "int8-dynamic", "int8"))
    whole = spec.universal()
    assert spec.parse(whole.id) == spec.parse(f"{whole.id}.fp32") == whole
    assert whole.id == ElasticSpec(axes, ()).universal().id, "a second precision changes no id"
    for precision in ("int8", "int8-dynamic"):
        other = replace(whole, precision=precision)
        assert other.id == f"{whole.id}.{precision}"
        assert spec.parse(other.id) == other
        assert not other.is_universal


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(SPEC, "an id that names none"), (replace(SPEC, precisions=("fp32", "int8")), "one of fp32, int8")],
)
def test_a_precision_that_no_submodel_has(spec: ElasticSpec, expected: str) -> None:
    with pytest.raises(PlanError) as refusal:
        spec.parse("ffn64.int4")
    assert str(refusal.value) == f"submodel 'ffn64.int4': unknown precision 'int4'; expected {expected}"


@given(st.integers(1, 2**11), st.integers(1, 2**11))
def test_buckets_are_read_in_both_spellings(batch: int, sequence: int) -> None:
    bucket = Bucket(batch, sequence)
    assert Bucket.parse(bucket.label) == Bucket.parse(f" {batch}x{sequence} ") == bucket
    assert bucket.tokens == batch * sequence


@pytest.mark.parametrize(
    "text", ["", "1", "1x", "x8", "0x8", "1x0", "-1x8", "1x8x2", "1 x 8", "1x8\n9", "\u0661x8", "1e2x8"]
)
def test_what_is_no_bucket(text: str) -> None:
    with pytest.raises(ValueError, match="expected BATCHxSEQUENCE, such as 1x128"):
        Bucket.parse(text)


def test_buckets_are_ordered_by_batch_then_sequence() -> None:
    assert sorted([Bucket(2, 8), Bucket(1, 128), Bucket(1, 32)]) == [Bucket(1, 32), Bucket(1, 128), Bucket(2, 8)]


def test_a_range_is_read_in_both_spellings_and_knows_its_ends() -> None:
    bucket = Bucket.parse("1..8x1..512")
    assert bucket == Bucket(8, 512, 1, 1) == Bucket.parse(bucket.label) == Bucket.parse(str(bucket))
    assert (bucket.label, str(bucket), bucket.free) == ("b1_8-s1_512", "1..8x1..512", ("batch", "sequence"))
    assert (bucket.smallest, bucket.largest, bucket.tokens) == (Bucket(1, 1), Bucket(8, 512), 4096)
    assert Bucket.parse("4x2..16").smallest == Bucket(4, 2)
    assert not bucket.is_static and Bucket(1, 128).is_static  # noqa: PT018  (one property)
    assert sorted([bucket, Bucket(8, 512)]) == [bucket, Bucket(8, 512)]


def test_what_runs_of_a_request_in_a_bucket() -> None:
    bucket = Bucket(8, 64, None, 4)
    assert bucket.holds(Bucket(3, 64))
    assert not bucket.holds(Bucket(3, 65))
    assert bucket.filled(Bucket(3, 2)) == Bucket(8, 4)
    assert bucket.filled(Bucket(3, 33)) == Bucket(8, 33)
    assert bucket.nearest(Bucket(1, 100)) == Bucket(8, 64)
    assert Bucket(1, 128).filled(Bucket(1, 5)) == Bucket(1, 128)


@pytest.mark.parametrize("text", ["1x128..1", "1x5..5", "1x0..8", "8..1x3"])
def test_a_range_rises(text: str) -> None:
    with pytest.raises(ValueError, match="expected one that rises from 1 or more"):
        Bucket.parse(text)


def test_the_sequences_of_a_range_double_from_end_to_end() -> None:
    assert Bucket.parse("1x1..16").doublings == (1, 2, 4, 8, 16)
    assert Bucket.parse("1..4x5..40").doublings == (5, 8, 16, 32, 40)
    assert Bucket(3, 7).doublings == (7,)
