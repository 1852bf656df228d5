from __future__ import annotations

from dataclasses import replace

import pytest
from nestforge.elastic import Bucket
from nestforge.errors import BundleFormatError
from nestforge.runtime.bundle.entries.tensor_spec import TensorSpec
from nestforge.runtime.bundle.manifest import Manifest, Provenance
from nestforge.runtime.bundle.shape_profile import ShapeProfile, shape_profile

IDS = TensorSpec("ids", "int64", ("batch", "sequence"))
KIND = TensorSpec("kind", "int64", ("batch",))
STATE = TensorSpec("state", "float32", (3, "sequence", 16))


def tuned_for(manifest: Manifest, bucket: str, asked: object = None) -> str:
    profile = {} if asked is None else {"budget_at": asked}
    found = shape_profile(replace(manifest, provenance=Provenance({}, (), profile, {})), Bucket.parse(bucket))
    assert str(found.bucket) == bucket
    return str(found.tuned)


def test_kernels_are_picked_where_budgets_are_judged(manifest: Manifest) -> None:
    assert tuned_for(manifest, "1..8x1..512") == "1x512"
    assert tuned_for(manifest, "2..8x512") == "2x512"
    assert tuned_for(manifest, "1..8x1..512", "4x64") == "4x64"
    # Of two ranges each its nearest shape.
    assert [tuned_for(manifest, bucket, "1x100") for bucket in ("1x1..128", "1x129..512")] == ["1x100", "1x129"]
    assert tuned_for(manifest, "2x8", "1x4") == "2x8"


def test_a_shape_that_is_none_is_refused(manifest: Manifest) -> None:
    with pytest.raises(
        BundleFormatError, match=r"^manifest.json: provenance: profile: budget_at: bucket '5': expected"
    ):
        tuned_for(manifest, "1..8x1..512", 5)


def test_what_is_open_is_written_as_tensorrts_tools_read_it() -> None:
    profile = ShapeProfile(Bucket(4, 16, min_sequence=2), Bucket(4, 8))
    assert profile.shapes(STATE) == ((3, 2, 16), (3, 8, 16), (3, 16, 16))
    assert profile.written([IDS, KIND, STATE]) == (
        *("ids:4x2,state:3x2x16", "ids:4x8,state:3x8x16", "ids:4x16,state:3x16x16"),
    )
    assert ShapeProfile(Bucket(4, 16), Bucket(4, 16)).written([IDS, KIND, STATE]) == ()
