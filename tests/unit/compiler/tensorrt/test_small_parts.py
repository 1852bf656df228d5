"""Parts around a build: progress, profile shapes, the inspector's answer, cases."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.shape_profile import ShapeProfile
from nestforge.compiler.tensorrt.build_bundle import layer_kinds
from nestforge.compiler.tensorrt.check_plan import case_feeds
from nestforge.compiler.tensorrt.progress import Phases
from nestforge.errors import BuildError

IDS = TensorSpec("ids", "int64", ("batch", "sequence"), high=50)
MASK = TensorSpec("mask", "int64", ("batch", "sequence"), pad=0, high=2)
STATE = TensorSpec("state", "float32", ("batch", "sequence", 16))
BUCKET = Bucket(2, 8)


def test_outermost_phases_are_progress() -> None:
    seen: list[tuple[str, int, int]] = []
    phases = Phases(lambda *report: seen.append(report), None)
    phases.started("Building", None, 2)
    phases.started("Timing", "Building", 7)
    assert phases.stepped("Timing", 0)
    phases.finished("Timing")
    assert phases.stepped("Building", 0)
    phases.finished("Building")
    assert seen == [("Building", 0, 2), ("Building", 1, 2), ("Building", 2, 2)]
    assert not phases.timed_out


def test_the_first_step_after_the_deadline_stops_the_build_and_so_do_all_others() -> None:
    now = 0.0
    phases = Phases(lambda *_: None, 10.0, lambda: now)
    phases.started("Building", None, 9)
    assert phases.stepped("Building", 0)
    now = 10.1
    assert not phases.stepped("Building", 1)
    now = 0.0
    assert not phases.stepped("Building", 2)
    assert phases.timed_out


def test_only_inputs_with_an_open_dimension_need_a_profile() -> None:
    one = ShapeProfile(BUCKET, BUCKET)
    static = {"ids": (2, 8), "state": (2, 8, 16)}
    assert one.parsed_shapes("here", static, (IDS, STATE)) == {}
    some = {"ids": (-1, -1), "state": (2, 8, 16)}
    assert one.parsed_shapes("here", some, (IDS, STATE)) == {"ids": ((2, 8), (2, 8), (2, 8))}
    between = ShapeProfile(Bucket(2, 8, min_sequence=3), Bucket(2, 5))
    free = {"ids": (2, -1), "state": (2, -1, 16)}
    assert between.parsed_shapes("here", free, (IDS, STATE)) == {
        "ids": ((2, 3), (2, 5), (2, 8)),
        "state": ((2, 3, 16), (2, 5, 16), (2, 8, 16)),
    }


@pytest.mark.parametrize("parsed", [{"ids": (2, 9)}, {"ids": (2, 8, 1)}, {"words": (2, 8)}, {}])
def test_another_interface_is_refused(parsed: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(BuildError, match=r"^here: its graph takes .*; the manifest says \{'ids': \(2, 8\)\}$"):
        ShapeProfile(BUCKET, BUCKET).parsed_shapes("here", parsed, (IDS,))


def test_a_graph_that_fixes_a_free_dimension_is_refused() -> None:
    between = ShapeProfile(Bucket(2, 8, min_sequence=3), Bucket(2, 5))
    with pytest.raises(BuildError) as raised:
        between.parsed_shapes("here", {"ids": (2, 8)}, (IDS,))
    assert str(raised.value) == "here: its graph takes ids [2, 8]; the manifest says {'ids': (2, 'sequence')}"


def test_layers_are_counted_by_kind() -> None:
    gemm, other = {"Name": "a", "LayerType": "gemm"}, {"Name": "b", "LayerType": "Reformat"}
    found = layer_kinds(json.dumps({"Layers": [gemm, other, {"LayerType": "gemm"}, "plain"], "Bindings": ["ids"]}))
    assert found == {"Reformat": 1, "gemm": 2, "unknown": 1}


@pytest.mark.parametrize("text", ["", "[]", '{"Bindings": []}', '{"Layers": 3, "Bindings": []}'])
def test_another_answer_is_refused(text: str) -> None:
    with pytest.raises(BuildError, match="engine inspector: expected its JSON of TensorRT 10 or 11, got"):
        layer_kinds(text)


@given(st.integers(1, 4), st.integers(1, 16), st.integers(0, 50))
def test_cases_attend_to_a_prefix_of_every_row(batch: int, sequence: int, seed: int) -> None:
    feeds = case_feeds((IDS, MASK, STATE), Bucket(batch, sequence), seed)
    mask = feeds["mask"]
    assert mask.dtype == np.int64
    assert (mask[:, 0] == 1).all()
    assert (np.diff(mask, axis=1) <= 0).all()
    assert seed or mask.all()
    assert feeds["state"].shape == (batch, sequence, 16)
    assert feeds["ids"].max() < 50
