from __future__ import annotations

import numpy as np
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.runtime.inputs.check_inputs import InputChecker
from nestforge.runtime.inputs.feeds import nearest_shape, random_feeds

SPECS = (
    TensorSpec("ids", "int64", ("batch", "sequence"), pad=0, high=7),
    TensorSpec("free", "int32", ("batch",)),
    TensorSpec("flags", "bool", ("batch", "sequence")),
    TensorSpec("pixels", "float16", ("batch", 3)),
)


def test_feeds_are_what_the_model_takes() -> None:
    feeds = random_feeds(SPECS, Bucket(4, 64))
    assert InputChecker(SPECS).shape_of(feeds) == Bucket(4, 64)
    assert set(np.unique(feeds["ids"])) == set(range(7))
    assert not feeds["free"].any()
    assert set(np.unique(feeds["flags"])) == {False, True}
    assert feeds["pixels"].std() > 0


def test_the_seed_decides() -> None:
    first, again, other = (random_feeds(SPECS, Bucket(2, 8), seed) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["ids"], other["ids"])


def test_the_shape_of_a_range_that_feeds_have_or_come_nearest_to() -> None:
    feeds = random_feeds(SPECS, Bucket(3, 20))
    assert nearest_shape(SPECS, feeds, Bucket(4, 64, 1, 1)) == Bucket(3, 20)
    assert nearest_shape(SPECS, feeds, Bucket(2, 64, 1, 32)) == Bucket(2, 32)
    assert nearest_shape(SPECS, feeds, Bucket(4, 64)) == Bucket(4, 64)
    assert nearest_shape(SPECS, {**feeds, "flags": feeds["flags"][:2]}, Bucket(4, 64, 1, 1)) == Bucket(3, 20)
    assert nearest_shape(SPECS, {}, Bucket(4, 64, 1, 1)) == Bucket(4, 64)
