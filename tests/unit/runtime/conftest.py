"""The small real bundle, for all tests of this folder."""

from support.small_bundle import (
    edit_manifest,
    exits_bundle,
    expected,
    feeds,
    manifest,
    own_bundle,
    range_bundle,
    tiny_bundle,
)

__all__ = [
    "edit_manifest",
    "exits_bundle",
    "expected",
    "feeds",
    "manifest",
    "own_bundle",
    "range_bundle",
    "tiny_bundle",
]
