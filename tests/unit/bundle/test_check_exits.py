from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import FileEntry, Manifest
from nestforge.bundle.read_manifest import read_manifest
from nestforge.errors import BundleFormatError
from nestforge.strict import unstructure
from support.exit_bundles import exits_manifest


@pytest.fixture
def data() -> dict[str, Any]:
    """One bucket; engines: depth2, its to1 and to2, depth4, its to1, to2 and to4."""
    manifest = exits_manifest([Bucket(1, 8)])
    names = sorted({engine.file for engine in manifest.engines})
    return dict(unstructure(replace(manifest, files=tuple(FileEntry(name, 1, "a" * 64) for name in names))))


def read(data: object) -> Manifest:
    return read_manifest(json.dumps(data).encode(), "m")


def test_reads_back_what_was_written(data: dict[str, Any]) -> None:
    manifest = read(data)
    assert unstructure(manifest) == data
    assert manifest.exits is not None
    assert manifest.interface("to2") == (manifest.exits.segments[1].inputs, manifest.exits.segments[1].outputs)


def without_exits(data: dict[str, Any]) -> None:
    """What a model without an entropy has: whole engines."""
    data.pop("exits")
    data["engines"] = [engine for engine in data["engines"] if "segment" not in engine]


def test_a_depth_without_exits_is_read(data: dict[str, Any]) -> None:
    without_exits(data)
    assert read(data).exits is None


def segment(index: int, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["exits"]["segments"][index].update(changes)


def engine(index: int, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["engines"][index].update(changes)


def spec(index: int, kind: str, number: int, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["exits"]["segments"][index][kind][number].update(changes)


def exits(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["exits"].update(changes)


def no_depth(data: dict[str, Any]) -> None:
    data["axes"] = [{"name": "ffn", "size": 4}]
    for entry, width in zip(data["submodels"], (2, 4), strict=True):
        entry.update(id=f"ffn{width}", values={"ffn": [width]})
    for each in data["engines"]:
        each["submodel"] = each["submodel"].replace("depth", "ffn")
    for budget in data["budgets"]:
        budget["submodel"] = budget["submodel"].replace("depth", "ffn")


Edit = Callable[[dict[str, Any]], object]
REFUSED: list[tuple[str, Edit, str]] = [
    (
        "choices fall",
        lambda d: d["axes"][0].update(choices=[2, 1, 4]),
        "axis depth: choices [2, 1, 4]; expected rising",
    ),
    ("choices end early", lambda d: d["axes"][0].update(choices=[1, 2]), "axis depth: choices [1, 2]; expected rising"),
    ("no choice", lambda d: d["axes"][0].update(choices=[]), "axis depth: choices []; expected rising"),
    ("choice of 0", lambda d: d["axes"][0].update(choices=[0, 4]), "axis depth: choices [0, 4]; expected rising"),
    (
        "depth off",
        lambda d: d["submodels"][0].update(values={"depth": [3]}),
        "axis depth: expected one of 1, 2, 4, got 3",
    ),
    ("no depth axis", no_depth, "axis depth has []"),
    ("choice without exit", lambda d: d["axes"][0].update(choices=[1, 2, 3, 4]), "axis depth has [1, 2, 3, 4]"),
    ("layers fall", segment(0, layer=3), "exits: segments end at layers [3, 2, 4]; expected at least two, rising"),
    (
        "one segment",
        lambda d: d["exits"].update(segments=d["exits"]["segments"][:1]),
        "layers [1]; expected at least two",
    ),
    ("other end", segment(2, layer=5), "exits: segments end at layers [1, 2, 5], axis depth has [1, 2, 4]"),
    (
        "same name",
        segment(1, name="to1"),
        "exits: segments are named ['to1', 'to1', 'to4']; expected names that differ",
    ),
    ("thresholds", lambda d: d["exits"]["gate"].update(thresholds=[0.1]), "exits: 1 thresholds, expected 2"),
    ("threshold NaN", lambda d: d["exits"]["gate"].update(thresholds=["x", 1]), "thresholds[0]: expected a number"),
    ("compare", lambda d: d["exits"]["gate"].update(compare=">"), "compare"),
    (
        "logits",
        exits(logits="scores"),
        "outputs are logits float32 [batch, 3], entropy float32 [batch]; expected those",
    ),
    ("classes", exits(classes=4), "outputs are logits float32 [batch, 3], entropy float32 [batch]; expected those of"),
    ("state", exits(state_out="state"), "exits: 'state' is not an output [batch, sequence, H] of segment to1"),
    (
        "state dims",
        spec(0, "outputs", 0, dims=["batch", 4]),
        "exits: 'next_state' is not an output [batch, sequence, H]",
    ),
    (
        "state in",
        exits(state_in="hidden"),
        "segment to2: inputs are state float32 [batch, sequence, 4], attention_mask",
    ),
    ("mask", exits(mask="state"), "exits: mask 'state' is not an input of whole numbers [batch, sequence]"),
    ("state width", spec(1, "inputs", 0, dims=["batch", "sequence", 5]), "segment to2: inputs are state float32"),
    ("first inputs", segment(0, inputs=[]), "segment to1: inputs are ; expected input_ids int64 [batch, sequence]"),
    ("entropy dtype", spec(1, "outputs", 2, dtype="float16"), "segment to2: outputs are next_state float32"),
    (
        "last has state",
        lambda d: d["exits"]["segments"][2].update(outputs=d["exits"]["segments"][0]["outputs"]),
        "segment to4: outputs",
    ),
    ("bad dim", spec(1, "inputs", 0, dims=["batch", "steps", 4]), "tensor state: dims ['batch', 'steps', 4]; expected"),
    (
        "input order",
        lambda d: d["inputs"][0].update(dims=["sequence", "batch"]),
        "with exits, expected [batch, sequence",
    ),
    ("unknown segment", engine(1, segment="to3"), "engine depth2.to1@b1-s8: segment 'to3' is not in this manifest"),
    (
        "too deep",
        engine(2, segment="to4", file="to4.b1-s8.onnx", flops=1600, weight_bytes=32),
        "submodel depth2 ends before segment to4",
    ),
    ("segment missing", lambda d: d["engines"].pop(5), "submodel depth4 at b1-s8: has segments, but no to2"),
    (
        "segment without bytes",
        lambda d: d["engines"][6].pop("weight_bytes"),
        "engine depth4.to4@b1-s8: a segment without weight_bytes",
    ),
    (
        "shared file",
        engine(4, flops=1),
        "engine depth4.to1@b1-s8: differs from another engine of its file to1.b1-s8.onnx",
    ),
    ("shared bytes", engine(4, private_bytes=1), "differs from another engine of its file to1.b1-s8.onnx in more than"),
    (
        "same place",
        engine(5, segment="to1", file="to1.b1-s8.onnx"),
        "engine for 'depth4, segment to1 at b1-s8, onnxruntime' stands twice",
    ),
    (
        "range for TensorRT",
        engine(0, backend="tensorrt", bucket={"batch": 1, "sequence": 8, "min_sequence": 1}),
        "engine depth2@b1-s8: a range, which engines for tensorrt of a model with exits have not",
    ),
    ("no exits", lambda d: d.pop("exits"), "engine depth2.to1@b1-s8: segment 'to1', but this manifest has no exits"),
]


@pytest.mark.parametrize(("edit", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refuses(data: dict[str, Any], edit: Edit, message: str) -> None:
    edit(data)
    with pytest.raises(BundleFormatError) as error:
        read(data)
    assert message in str(error.value)
    assert str(error.value).startswith("m: ") or "m." in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_two_whole_engines_is_refused_too(data: dict[str, Any]) -> None:
    without_exits(data)
    data["engines"][1]["file"] = data["engines"][0]["file"]
    with pytest.raises(BundleFormatError, match=r"engine depth4@b1-s8: differs from another engine of its file depth2"):
        read(data)
