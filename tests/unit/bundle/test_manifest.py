import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import ParityRouting, RoutingEntry
from nestforge.bundle.entries.tensor_spec import DTYPES, TensorSpec
from nestforge.bundle.manifest import FileEntry, Manifest, Quality
from nestforge.bundle.read_manifest import MAX_JSON_BYTES, is_plain_name, read_manifest
from nestforge.elastic import Axis
from nestforge.errors import BundleFormatError, SelectionError
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


def test_an_id_may_leave_out_kinds_at_full_size(manifest: Manifest) -> None:
    axes = (*manifest.axes, Axis("layers.0.heads", 2))
    ids = {entry.id: replace(entry, id=f"{entry.id}-heads2") for entry in manifest.submodels}
    wider = replace(manifest, axes=axes, submodels=tuple(ids.values()))
    assert wider.submodel("ffn16").id == "ffn16-heads2"
    assert wider.submodel("heads2").id == "ffn32-heads2", "the kinds left out have their full size"
    with pytest.raises(SelectionError, match="no submodel 'heads1' in this bundle"):
        wider.submodel("heads1")


def values(data: dict[str, Any], new: dict[str, list[int]]) -> None:
    data["submodels"][0]["values"] = new


def test_figures_and_roles_are_read_back(data: dict[str, Any]) -> None:
    quality = {"samples": 40, "figures": {"token_agreement": 1, "new_one": 2.5}, "data_sha256": "0" * 64}
    data["submodels"][0]["quality"] = {**quality, "positions": 100}
    data["outputs"][0]["role"] = "next_tokens"
    manifest = read(data)
    assert manifest.submodels[0].quality == Quality(40, {"token_agreement": 1.0, "new_one": 2.5}, "0" * 64, 100)
    assert (manifest.outputs[0].role, manifest.outputs[1].role) == ("next_tokens", None)
    assert unstructure(manifest) == data


def quality(data: dict[str, Any], **fields: object) -> None:
    data["submodels"][0]["quality"] = fields


def test_routing_metadata_and_variants_are_read_back(data: dict[str, Any]) -> None:
    assert not {"routing", "metadata", "variants"} & data["engines"][0]["kind"].keys(), (
        "written only where there is something"
    )
    routing(data)
    manifest = read(data)
    assert unstructure(manifest) == data
    engine, other = manifest.engines[:2]
    assert engine.routing == (RoutingEntry("routes.1", (1, 4)), RoutingEntry("routes.2", (1, 4)))
    assert (engine.metadata, engine.variants) == (
        {"capacity": 4, "router": "experts_choose"},
        {"moe.combine": "gather"},
    )
    assert engine.parity.routing[1] == ParityRouting("routes.2", 20, 1, 2e-7, {"tokens_dropped": 0.25})
    assert (other.routing, other.metadata, other.variants) == (None, None, None)


def routing(data: dict[str, Any], **changes: object) -> None:
    """Gives the first engine two tensors of routes and a receipt of them."""
    names = ("routes.1", "routes.2")
    receipt = {"made": 20, "differing": 1, "worst_score_gap": 2e-7, "shares": {"tokens_dropped": 0.25}}
    data["engines"][0] = engine = json.loads(json.dumps(data["engines"][0]))  # receipts are shared
    engine["kind"]["routing"] = [{"name": name, "shape": [1, 4]} for name in names]
    engine["kind"]["metadata"] = {"capacity": 4, "router": "experts_choose"}
    engine["kind"]["variants"] = {"moe.combine": "gather"}
    engine["parity"]["routing"] = [{"name": name, **receipt} for name in names]
    (engine if "parity" in changes else engine["kind"]).update(changes)


def judged(data: dict[str, Any], **changes: object) -> None:
    routing(data)
    data["engines"][0]["parity"]["routing"][0].update(changes)


Edit = Callable[[dict[str, Any]], object]
REFUSED: list[tuple[str, Edit, str]] = [
    (
        "newer schema",
        lambda d: d.update(schema_version=2),
        "schema_version '2', expected 1; use the nestforge release that wrote it, or comp",
    ),
    (
        "range that falls",
        lambda d: d["engines"][0]["bucket"].update(min_sequence=d["engines"][0]["bucket"]["sequence"]),
        "expected one that rises from 1 or more",
    ),
    ("no schema", lambda d: d.pop("schema_version"), "schema_version 'None', expected 1"),
    ("unknown key", lambda d: d.update(engine=[]), "unknown key 'engine'; did you mean 'engines'?"),
    ("escape up", lambda d: d["files"][0].update(path="../weights"), "'../weights' may leave the bundle"),
    ("lists itself", lambda d: d["files"][0].update(path="manifest.json"), "files lists manifest.json"),
    ("same file", lambda d: d["files"][0].update(path="TOKENIZER.json"), "file 'tokenizer.json' stands twice"),
    ("negative size", lambda d: d["files"][0].update(bytes=-1), "bytes: expected at least 0, got -1"),
    ("bad hash", lambda d: d["files"][0].update(sha256="A" * 64), "expected 64 lower-case hexadecimal digits"),
    (
        "precision of another back end",
        lambda d: d["engines"][0].update(backend="openvino", precision="int8"),
        "openvino runs no engine in int8",
    ),
    (
        "kind of another place",
        lambda d: d["engines"][0].update(kind={"name": "decode"}),
        "of kind decode; expected it among those of generation",
    ),
    (
        "kind of another back end",
        lambda d: d["engines"][0].update(backend="openvino", kind={"name": "decode"}),
        "openvino runs no engine of kind decode",
    ),
    ("engine file", lambda d: d["engines"][0].update(file="other.onnx"), "'other.onnx' is not among the files"),
    ("engine submodel", lambda d: d["engines"][0].update(submodel="ffn5"), "submodel 'ffn5' is not in this manifest"),
    ("no parity", lambda d: d["engines"][0].pop("parity"), "has no parity receipt"),
    ("empty bucket", lambda d: d["engines"][0]["bucket"].update(batch=0), "b0-s8 is outside 1"),
    ("huge bucket", lambda d: d["engines"][0]["bucket"].update(sequence=2**40), "is outside 1"),
    (
        "large bucket",
        lambda d: d["engines"][0]["bucket"].update(batch=1, sequence=2**26),
        "is outside 1..4194304 tokens",
    ),
    (
        "large tensor",
        lambda d: d["outputs"][0].update(dims=["batch", "sequence", 2**29]),
        "engine ffn16@b1-s8: tensor hidden has more than 2147483648 elements",
    ),
    ("same engine", lambda d: d["engines"].append(d["engines"][0]), "engine 'ffn16@b1-s8' stands twice"),
    ("label is an id", lambda d: d["submodels"][0].update(labels=["ffn32"]), "submodel 'ffn32' stands twice"),
    ("budget", lambda d: d["budgets"][0].update(submodel="ffn5"), "budget edge: submodel 'ffn5' is not"),
    ("dim", lambda d: d["inputs"][0].update(dims=["rows"]), "tensor input_ids: dims"),
    ("text input", lambda d: d["text"].update(ids="tokens"), "text: 'tokens' is not an input"),
    (
        "file of an order",
        lambda d: d["ranking"].update(order_file="ranking.safetensors"),
        "ranking: file 'ranking.safetensors' is not among the files",
    ),
    ("text file", lambda d: d["text"].update(file="t.json"), "text: file 't.json' is not among the files"),
    ("axis size", lambda d: d["axes"][0].update(size=0), "axis layers.0.ffn: size 0 is outside 1..2147483648"),
    ("same axis", lambda d: d["axes"].append(d["axes"][0]), "axis 'layers.0.ffn' stands twice"),
    (
        "kinds",
        lambda d: d["axes"].extend({"name": f"k{'x' * i}", "size": 1} for i in range(64)),
        "axes are of 65 kinds, more than the 64 allowed",
    ),
    ("value kind", lambda d: values(d, {"ffm": [16]}), "submodel ffn16: unknown axis kind 'ffm'"),
    ("no kind", lambda d: values(d, {}), "submodel ffn16: values of ffn; expected one for each of 1 axes"),
    (
        "value count",
        lambda d: values(d, {"ffn": [16, 16]}),
        "axis kind ffn: expected 1 values, one per layer, got more",
    ),
    (
        "value for all layers",
        lambda d: d["axes"].append({"name": "layers.1.ffn", "size": 32}),
        "submodel ffn16: values of ffn; expected one for each of 2 axes",
    ),
    (
        "precision of another submodel",
        lambda d: d["engines"][0].update(precision="int8"),
        "engine ffn16@b1-s8: in int8; its submodel is in fp32",
    ),
    (
        "id without its precision",
        lambda d: d["submodels"][0].update(precision="int8"),
        "submodel ffn16: its values and precision are those of ffn16.int8",
    ),
    ("other id", lambda d: values(d, {"ffn": [8]}), "submodel ffn16: its values and precision are those of ffn8"),
    ("pad", lambda d: d["inputs"][0].update(dtype="int32", high=None, pad=2**31), "pad 2147483648 is outside"),
    ("pad of bool", lambda d: d["inputs"][1].update(dtype="bool", pad=2), "attention_mask: pad 2 is outside 0..1"),
    ("pad of float16", lambda d: d["inputs"][0].update(dtype="float16", high=None, pad=70000), "-65504..65504"),
    ("pad beyond high", lambda d: d["inputs"][0].update(pad=16), "tensor input_ids: pad 16 is outside 0..15"),
    *(
        (f"negative {name}", lambda d, name=name: d["submodels"][0].update({name: -5}), f"{name}: expected at least 0")
        for name in ("parameters", "weight_bytes")
    ),
    *(
        (f"negative {name}", lambda d, name=name: d["engines"][0].update({name: -5}), f"{name}: expected at least 0")
        for name in ("private_bytes", "flops", "moved_bytes", "activation_bytes")
    ),
    (
        "figure that is no name",
        lambda d: quality(d, samples=4, figures={"Loss\n": 1}, data_sha256="0" * 64),
        "submodel ffn16: figure 'Loss\\n'; expected a name such as mean_cosine",
    ),
    (
        "quality of nothing",
        lambda d: quality(d, samples=0, figures={}, data_sha256="0" * 64),
        "samples: expected at least 1, got 0",
    ),
    ("unknown role", lambda d: d["outputs"][0].update(role="token"), "role: got 'token'; did you mean 'tokens'?"),
    ("role of an input", lambda d: d["inputs"][0].update(role="tokens"), "only the outputs of whole engines have one"),
    ("role that cannot be", lambda d: d["outputs"][1].update(role="tokens"), "cannot have role 'tokens'"),
    (
        "decision that stands twice",
        lambda d: routing(d, routing=[{"name": "routes.1", "shape": [4]}] * 2),
        "engine ffn16@b1-s8: tensor 'routes.1' stands twice",
    ),
    (
        "decision called like an output",
        lambda d: routing(d, routing=[{"name": "hidden", "shape": [4]}]),
        "engine ffn16@b1-s8: tensor 'hidden' stands twice",
    ),
    (
        "decision of no size",
        lambda d: routing(d, routing=[{"name": "routes.1", "shape": [1, 0]}]),
        "engine ffn16@b1-s8: route routes.1: shape [1, 0]; expected positive numbers",
    ),
    (
        "decision without a receipt",
        lambda d: routing(d, parity=d["engines"][1]["parity"]),
        "engine ffn16@b1-s8: receipt of routes []; it returns ['routes.1', 'routes.2']",
    ),
    (
        "receipt of no decision",
        lambda d: routing(d, routing=None),
        "engine ffn16@b1-s8: receipt of routes ['routes.1', 'routes.2']; it returns []",
    ),
    (
        "more that differ than were made",
        lambda d: judged(d, differing=21),
        "engine ffn16@b1-s8: route routes.1: 21 of 20 differ",
    ),
    ("negative margin", lambda d: judged(d, worst_score_gap=-1.0), "worst_score_gap: expected at least 0, got -1.0"),
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(DTYPES),
    pad=st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300),
    high=st.none() | st.integers(1, 300),
)
def test_a_pad_that_is_read_can_be_filled_in(data: dict[str, Any], dtype: str, pad: int, high: int | None) -> None:
    spec = TensorSpec("x", dtype, ("sequence",), pad=pad, high=high)
    try:
        read({**data, "inputs": [unstructure(spec)], "text": None})
    except BundleFormatError:
        low, high = (0 if high or dtype in ("uint8", "bool") else -128), min(high or 2, 2)
        assert not low <= pad < high  # what every dtype holds is accepted
        return
    filled = np.full(1, pad, dtype)
    assert np.isfinite(filled).all()
    assert high is None or 0 <= pad < high
    assert dtype.startswith("float") or filled[0] == pad
