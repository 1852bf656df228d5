"""What runners on a device share: checks of arrays, outputs of a run's own shape, and bound calls that end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleError, InputError
from nestforge.runtime.device.layout import CopyingRunner, Layout
from nestforge.runtime.inputs.arrays import Array, random_feeds

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
