from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import DTYPES as IN_MANIFEST
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleError, InputError
from nestforge.runtime.device.device import ALIGNMENT, DeviceArray
from nestforge.runtime.device.layout import CopyingRunner, Layout, Layouts, layout_of
from nestforge.runtime.inputs.arrays import Array, random_feeds

INPUTS = (TensorSpec("ids", "int64", ("batch", "sequence")), TensorSpec("flag", "bool", ("batch",)))
OUTPUTS = (TensorSpec("hidden", "float16", ("batch", "sequence", 4)),)
BUCKET = Bucket(2, 8)


def test_inputs_lie_first_and_everything_is_aligned() -> None:
    layout = layout_of(INPUTS, OUTPUTS, BUCKET)
    slots = {**layout.inputs, **layout.outputs}
    assert {name: (slot.offset, slot.bytes, slot.shape) for name, slot in slots.items()} == {
        "ids": (0, 128, (2, 8)),
        "flag": (256, 2, (2,)),
        "hidden": (512, 128, (2, 8, 4)),
    }
    assert (layout.input_bytes, layout.bytes) == (512, 768)


SPECS = st.lists(
    st.builds(
        TensorSpec,
        st.integers().map(str),
        st.sampled_from(sorted(IN_MANIFEST)),
        st.lists(st.one_of(st.sampled_from(["batch", "sequence"]), st.integers(1, 9)), max_size=4).map(tuple),
    ),
    min_size=2,
    max_size=8,
    unique_by=lambda spec: spec.name,
)


@given(SPECS, st.integers(1, 4), st.integers(1, 9))
def test_slots_never_overlap(specs: list[TensorSpec], batch: int, sequence: int) -> None:
    layout = layout_of(specs[:1], specs[1:], Bucket(batch, sequence))
    slots = [*layout.inputs.values(), *layout.outputs.values()]
    end = 0
    for slot in slots:
        assert slot.offset >= end
        assert slot.offset % ALIGNMENT == 0
        assert slot.bytes == prod(slot.shape) * np.dtype(slot.dtype).itemsize
        end = slot.offset + slot.bytes
    assert end <= layout.bytes
    assert layout.input_bytes == slots[1].offset


@pytest.fixture
def layout() -> Layout:
    return layout_of(INPUTS, OUTPUTS, BUCKET)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"ids": np.zeros((2, 8), np.int32)}, "ids: expected contiguous int64 [2, 8], got int32 [2, 8]"),
        ({"ids": np.zeros((8, 2), np.int64).T}, "ids: expected contiguous int64 [2, 8], got int64 [2, 8] with strides"),
        ({"ids": np.zeros((2, 9), np.int64)}, "ids: expected contiguous int64 [2, 8], got int64 [2, 9]"),
        ({"id": np.zeros(1)}, "has no input 'id'; it has ids, flag"),
    ],
)
def test_arrays_that_do_not_fit(layout: Layout, change: dict[str, np.ndarray], problem: str | None) -> None:
    feeds = {"ids": np.zeros((2, 8), np.int64), "flag": np.zeros(2, np.bool_)}
    assert layout.misfit({**feeds, **change}, {}) == problem


def test_a_missing_input_and_a_wrong_output(layout: Layout) -> None:
    assert layout.misfit({"ids": np.zeros((2, 8), np.int64)}, {}) == "no array for input flag"
    feeds = {"ids": np.zeros((2, 8), np.int64), "flag": np.zeros(2, np.bool_)}
    assert layout.misfit(feeds, {"hidden": np.zeros((2, 8, 4), np.float32)}) == (
        "hidden: expected contiguous float16 [2, 8, 4], got float32 [2, 8, 4]"
    )


def test_arrays_on_the_device_that_do_not_fit(layout: Layout) -> None:
    feeds = {"ids": DeviceArray(0, "int64", (2, 8)), "flag": DeviceArray(512, "bool", (2,))}
    assert layout.misfit(feeds, {"hidden": DeviceArray(1024, "float16", (2, 8, 4))}) is None
    assert layout.misfit({"ids": feeds["ids"]}, {}) == "no array for input flag"
    assert layout.misfit(feeds, {"other": feeds["ids"]}) == "has no output 'other'; it has hidden"
    wrong = {**feeds, "flag": DeviceArray(512, "uint8", (2,))}
    assert layout.misfit(wrong, {}) == "flag: expected contiguous bool [2], got uint8 [2]"


def test_a_tensor_in_a_block_of_the_host(layout: Layout) -> None:
    block = np.zeros(layout.bytes, np.uint8)
    layout.outputs["hidden"].host_view(block)[1, 7, 3] = 1.0
    assert np.flatnonzero(block).tolist() == [512 + 127]


def arrays(batch: int, sequence: int) -> dict[str, np.ndarray]:
    return {"ids": np.zeros((batch, sequence), np.int64), "flag": np.zeros(batch, np.bool_)}


@given(st.integers(1, 4), st.integers(2, 16))
def test_every_shape_of_a_range_lies_in_the_block_of_the_largest(batch: int, sequence: int) -> None:
    layouts = Layouts(INPUTS, OUTPUTS, Bucket(4, 16, 1, 2))
    layout = layouts.of(arrays(batch, sequence))
    assert layout == layout_of(INPUTS, OUTPUTS, Bucket(batch, sequence))
    assert layout.bytes <= layouts.largest.bytes
    assert layout.misfit(arrays(batch, sequence), {}) is None
    assert layouts.of({"ids": DeviceArray(0, "int64", (batch, sequence))}) == layout


@pytest.mark.parametrize(
    ("feeds", "problem"),
    [
        (arrays(5, 16), "ids: expected contiguous int64 [4, 16], got int64 [5, 16]"),
        (arrays(1, 1), "ids: expected contiguous int64 [1, 2], got int64 [1, 1]"),
        ({**arrays(2, 8), "flag": np.zeros(3, np.bool_)}, "flag: expected contiguous bool [2], got bool [3]"),
        ({**arrays(2, 8), "ids": np.zeros(2, np.int64)}, "ids: expected contiguous int64 [2, 16], got int64 [2]"),
        ({}, "no array for input flag, ids"),
    ],
)
def test_what_a_range_does_not_hold(feeds: dict[str, np.ndarray], problem: str) -> None:
    assert Layouts(INPUTS, OUTPUTS, Bucket(4, 16, 1, 2)).of(feeds).misfit(feeds, {}) == problem


def test_an_engine_of_one_shape_has_one_layout() -> None:
    layouts = Layouts(INPUTS, OUTPUTS, BUCKET)
    assert layouts.of(arrays(1, 3)) is layouts.largest


GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "bundle-ranges"  # engines of the range 1..4x1..16


class CountingRunner(CopyingRunner):
    """Writes the number of its run into every output."""

    runs = 0

    def open(self) -> None:
        self._opened = object()

    def _run(self, layout: Layout, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        assert all(feeds[name].shape == slot.shape for name, slot in layout.inputs.items())
        self.runs += 1
        for array in outputs.values():
            array[...] = self.runs


@pytest.fixture
def runner() -> CountingRunner:
    bundle = open_bundle(GOLDEN)
    runner = CountingRunner(bundle, bundle.manifest.engines[0])
    runner.open()
    return runner


def feeds_of(runner: CopyingRunner, shape: Bucket) -> dict[str, Array]:
    return random_feeds(runner._inputs, shape)


def test_outputs_have_the_shape_of_the_run(runner: CountingRunner) -> None:
    feeds = feeds_of(runner, Bucket(3, 5))
    outputs = runner.run({name: np.asfortranarray(array) for name, array in feeds.items()})
    assert [array.shape for array in outputs] == [(3, 5, 16), (3, 16), (3, 16)]
    assert all((array == 1).all() for array in outputs)
    with pytest.raises(InputError, match="input_ids"):
        runner.run({**feeds, "input_ids": feeds["input_ids"].astype(np.int32)})


def test_a_bound_call_ends_with_what_it_was_bound_to(runner: CountingRunner) -> None:
    feeds, pooled = feeds_of(runner, Bucket(2, 4)), np.zeros((2, 16), np.float32)
    call = runner.bind(feeds, {"pooler_output": pooled})
    call()
    call()
    assert (pooled == 2).all()
    runner.open()
    with pytest.raises(BundleError, match="not open"):
        call()
    runner._opened = None
    with pytest.raises(BundleError, match="not open"):
        runner.bind(feeds, {"pooler_output": pooled})
