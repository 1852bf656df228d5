"""Parts of a model that get engines of their own."""

from __future__ import annotations

from nestforge.bucket import Bucket
from nestforge.exporters.parts import Part


def test_a_part_has_the_bucket_of_the_profile_or_its_own() -> None:
    part = Part("head", (), (), lambda *_: [], lambda module: module)
    own = Part("head", (), (), lambda *_: [], lambda module: module, bucket=Bucket(64, 512, 1, 1))
    assert part.at(Bucket(1, 8)) == Bucket(1, 8)
    assert own.at(Bucket(1, 8)) == Bucket(64, 512, 1, 1)
