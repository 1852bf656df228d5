"""Reading the file of a plan; entries and keys are tested where plans are built and run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from nestforge.bundle.device_files.plan_index import Gpu, PlanEntry, PlanParity, read_plan
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleCorruptError
from nestforge.profiles.device_profile import TensorRTOptions

PLAN = b"a plan"
ENTRY = PlanEntry(
    graph="ffn16.b1-s8.onnx",
    file="x.plan",
    bytes=len(PLAN),
    sha256=hashlib.sha256(PLAN).hexdigest(),
    key="",
    gpu=Gpu("Fake GPU", "8.7", "10.3.0"),
    options=TensorRTOptions(),
    activation_bytes=0,
    seconds=0.0,
    layers={},
    parity=PlanParity("the graph", "exact", 1, 0.0, 1.0),
)


def sparse(path: Path) -> None:
    """64 GiB that take no place on the disk."""
    path.touch()
    os.truncate(path, 2**36)


def link(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(PLAN)
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "missing, or no regular file"),
        (Path.mkdir, "missing, or no regular file"),
        (link, "missing, or no regular file"),
        (lambda path: None, "missing, or no regular file"),
        (sparse, "68719476736 bytes, plans.json expects 6"),
        (lambda path: path.write_bytes(PLAN + b"x"), "7 bytes, plans.json expects 6"),
        (lambda path: path.write_bytes(b"A plan"), "sha256 .* expects"),
    ],
    ids=["pipe", "folder", "link", "missing", "huge", "longer", "changed"],
)
def test_what_is_not_the_plan_is_refused_and_not_waited_for(
    own_bundle: Path, make: Callable[[Path], object], message: str
) -> None:
    bundle = open_bundle(own_bundle)
    make(own_bundle / ENTRY.file)
    with pytest.raises(BundleCorruptError, match=rf"x\.plan: {message}.*; remove it and run `nestforge build BUNDLE`"):
        read_plan(bundle, ENTRY)


def test_a_plan_is_read_as_it_was_built(own_bundle: Path) -> None:
    (own_bundle / ENTRY.file).write_bytes(PLAN)
    assert read_plan(open_bundle(own_bundle), ENTRY) == PLAN
