from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.elastic import Bucket
from nestforge.errors import BundleFormatError, SelectionError
from nestforge.runtime.manifest import (
    MAX_JSON_BYTES,
    FileEntry,
    Manifest,
    TensorSpec,
    is_plain_name,
    read_manifest,
)
from nestforge.strict import unstructure


@pytest.fixture
def data(manifest: Manifest) -> dict[str, Any]:
    names = ["weights.safetensors", "tokenizer.json", *(engine.file for engine in manifest.engines)]
    files = tuple(FileEntry(name, 1, "a" * 64) for name in names)
    return dict(unstructure(replace(manifest, files=files)))


def read(data: object) -> Manifest:
    return read_manifest(json.dumps(data).encode(), "m")


def test_reads_back_what_was_written(data: dict[str, Any]) -> None:
    manifest = read(data)
    assert unstructure(manifest) == data
    assert manifest.inputs[0] == TensorSpec("input_ids", "int64", ("batch", "sequence"), pad=0, high=16)


def test_spec_follows_the_bucket() -> None:
    assert TensorSpec("x", "float32", ("batch", 3, "sequence")).shape(Bucket(2, 5)) == (2, 3, 5)


def test_submodel_by_id_and_label_and_the_list_of_what_exists(manifest: Manifest) -> None:
    assert manifest.submodel("S") is manifest.submodel("ffn16")
    with pytest.raises(SelectionError, match=r"no submodel 'M' in this bundle; it has ffn16 \(S\), ffn32 \(XL\)"):
        manifest.submodel("M")


Edit = Callable[[dict[str, Any]], object]
REFUSED: list[tuple[str, Edit, str]] = [
    ("newer schema", lambda d: d.update(schema_version=2), "schema_version '2', expected 1"),
    ("no schema", lambda d: d.pop("schema_version"), "schema_version 'None', expected 1"),
    ("schema is true", lambda d: d.update(schema_version=True), "schema_version: expected a whole number"),
    ("unknown key", lambda d: d.update(engine=[]), "unknown key 'engine'; did you mean 'engines'?"),
    ("missing key", lambda d: d.pop("budgets"), "missing key 'budgets'"),
    ("escape up", lambda d: d["files"][0].update(path="../weights"), "'../weights' may leave the bundle"),
    ("escape root", lambda d: d["files"][0].update(path="/etc/passwd"), "'/etc/passwd' may leave the bundle"),
    ("escape drive", lambda d: d["files"][0].update(path="C:weights"), "'C:weights' may leave the bundle"),
    ("hidden", lambda d: d["files"][0].update(path=".profile"), "'.profile' may leave the bundle"),
    ("lists itself", lambda d: d["files"][0].update(path="manifest.json"), "files lists manifest.json"),
    ("same file", lambda d: d["files"][0].update(path="TOKENIZER.json"), "file 'tokenizer.json' stands twice"),
    ("negative size", lambda d: d["files"][0].update(bytes=-1), "bytes: expected at least 0, got -1"),
    ("bad hash", lambda d: d["files"][0].update(sha256="A" * 64), "expected 64 lower-case hexadecimal digits"),
    ("engine file", lambda d: d["engines"][0].update(file="other.onnx"), "'other.onnx' is not among the files"),
    ("engine submodel", lambda d: d["engines"][0].update(submodel="ffn5"), "submodel 'ffn5' is not in this manifest"),
    ("no parity", lambda d: d["engines"][0].pop("parity"), "has no parity receipt"),
    ("empty bucket", lambda d: d["engines"][0]["bucket"].update(batch=0), "b0-s8 is outside 1"),
    ("huge bucket", lambda d: d["engines"][0]["bucket"].update(sequence=2**40), "is outside 1"),
    ("same engine", lambda d: d["engines"].append(d["engines"][0]), "engine 'ffn16@b1-s8' stands twice"),
    ("label is an id", lambda d: d["submodels"][0].update(labels=["ffn32"]), "submodel 'ffn32' stands twice"),
    ("budget", lambda d: d["budgets"][0].update(submodel="ffn5"), "budget edge: submodel 'ffn5' is not"),
    ("dim", lambda d: d["inputs"][0].update(dims=["rows"]), "tensor input_ids: dims"),
    ("dtype", lambda d: d["inputs"][0].update(dtype="float64"), "dtype: got 'float64'"),
    ("text input", lambda d: d["text"].update(ids="tokens"), "text: 'tokens' is not an input"),
    ("text file", lambda d: d["text"].update(file="t.json"), "text: file 't.json' is not among the files"),
    ("no engine", lambda d: d.update(engines=[]), "expected at least one engine"),
]


@pytest.mark.parametrize(("edit", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refuses(data: dict[str, Any], edit: Edit, message: str) -> None:
    edit(data)
    with pytest.raises(BundleFormatError) as error:
        read(data)
    assert message in str(error.value)
    assert str(error.value).startswith("m: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "schema_version 'None'"),
        (b"[" * 100_000, "not JSON"),
        (b'{"schema_version": 1, "schema_version": 1}', "a key stands twice"),
        (b'{"schema_version": NaN}', "NaN is not a JSON number"),
        (b" " * (MAX_JSON_BYTES + 1), "more than the 16777216 allowed"),
    ],
    ids=["not text", "a list", "deep", "repeated key", "NaN", "too large"],
)
def test_refuses_bytes(raw: bytes, message: str) -> None:
    with pytest.raises(BundleFormatError, match=message):
        read_manifest(raw, "m")


@given(st.text(max_size=12))
def test_a_plain_name_stays_in_its_folder(name: str) -> None:
    if is_plain_name(name):
        assert not set(name) & set('/\\:*?"<>|\0\n ')
        assert name not in {".", ".."}
