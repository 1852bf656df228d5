"""Engines that return the routes that they chose on the way, where it is requested."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import onnx
import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.bundle.read_manifest import read_manifest
from nestforge.errors import BundleCorruptError, BundleFormatError, InputError
from nestforge.runtime.engines.residency import RESIDENCIES, Residency
from nestforge.runtime.engines.runner import runner_for
from nestforge.runtime.inputs.arrays import random_feeds

EditManifest = Callable[[Path, Callable[[dict[str, Any]], object]], None]
Reference = Callable[..., dict[str, Any]]


@pytest.fixture
def routed(own_bundle: Path, edit_manifest: EditManifest) -> Path:
    """The tiny bundle, whose engines also say which neuron of ``hidden`` is the largest at each position."""
    sizes = {}
    for path in own_bundle.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        model.graph.node.append(onnx.helper.make_node("ArgMax", ["hidden"], ["largest.0"], axis=-1, keepdims=0))
        shape = [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim[:2]]
        output = onnx.helper.make_tensor_value_info("largest.0", onnx.TensorProto.INT64, shape)
        model.graph.output.append(output)
        raw = model.SerializeToString()
        path.write_bytes(raw)
        sizes[path.name] = (len(raw), hashlib.sha256(raw).hexdigest())

    def edit(data: dict[str, Any]) -> None:
        for entry in data["files"]:
            if entry["path"] in sizes:
                entry["bytes"], entry["sha256"] = sizes[entry["path"]]
        for engine in data["engines"]:
            bucket = engine["bucket"]
            engine["kind"]["routing"] = [{"name": "largest.0", "shape": [bucket["batch"], bucket["sequence"]]}]
            receipt = {"name": "largest.0", "made": 8, "differing": 0, "worst_score_gap": 0.0, "shares": {}}
            engine["parity"]["routing"] = [receipt]

    edit_manifest(own_bundle, edit)
    return own_bundle


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_runner_returns_routes_behind_the_outputs_when_asked(
    routed: Path, expected: Reference, residency: Residency, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle = open_bundle(routed)
    engine = bundle.manifest.engines[0]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    with runner_for(bundle, engine, residency, 1) as runner:
        outputs, everything = runner.run(feeds), runner.run(feeds, routing=True)
    assert [array.shape for array in outputs] == [(1, 8, 16), (1, 16)]
    assert len(everything) == 3
    want = expected(16, feeds["input_ids"], feeds["attention_mask"])["hidden"]
    attended = feeds["attention_mask"].astype(bool)
    np.testing.assert_array_equal(everything[2][attended], want.argmax(-1)[attended])
    assert everything[2].dtype == np.int64


def test_an_answer_has_the_routes_of_its_whole_bucket(routed: Path, feeds: Callable[..., Any]) -> None:
    inputs = feeds(1, 5)
    with nestforge.load(routed) as model:
        answer = model(inputs, submodel="ffn16", routing=True)
        assert model(inputs, submodel="ffn16").routing is None
        with pytest.raises(InputError, match="routing: is of one run, and these rows take 3; send fewer at once"):
            model(feeds(3, 8), submodel="ffn16", routing=True)
    assert answer.padding is not None
    assert answer.outputs["hidden"].shape == (1, 5, 16)
    assert answer.routing["largest.0"].shape == (1, 8)
    np.testing.assert_array_equal(answer.routing["largest.0"][:, :5], answer.outputs["hidden"].argmax(-1))


def test_engines_without_routing_have_none_to_return(
    tiny_bundle: Path, exits_bundle: Path, feeds: Callable[..., Any]
) -> None:
    with (
        nestforge.load(tiny_bundle) as model,
        pytest.raises(InputError, match=r"routing: engine ffn32@b1-s8 returns none; ask for its outputs alone"),
    ):
        model(feeds(1, 8), routing=True)
    bundle = open_bundle(tiny_bundle)
    engine = bundle.manifest.engines[0]
    with runner_for(bundle, engine, "shared", 1) as runner:
        assert len(runner.run(random_feeds(bundle.manifest.inputs, engine.bucket), routing=True)) == 2
    with nestforge.load(exits_bundle) as model:
        bucket = model.bundle.manifest.engines[0].bucket
        with pytest.raises(InputError, match=r"routing: engine .* returns none"):
            model(random_feeds(model.bundle.manifest.inputs, bucket), routing=True)


def test_an_engine_returns_the_routes_of_the_manifest(routed: Path, edit_manifest: EditManifest) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["engines"][0]["kind"]["routing"][0]["shape"] = [1, 9]

    edit_manifest(routed, edit)
    bundle = open_bundle(routed)
    with (
        pytest.raises(BundleCorruptError, match=r"engine ffn16@b1-s8: outputs are .*\(1, 8\)"),
        runner_for(bundle, bundle.manifest.engines[0], "shared", 1),
    ):
        pass


def test_segments_route_nothing(exits_bundle: Path) -> None:
    data = json.loads((exits_bundle / "manifest.json").read_bytes())
    segment = next(engine for engine in data["engines"] if engine["kind"]["name"] == "segment")
    segment["kind"]["routing"] = [{"name": "routes.0", "shape": [1, 4]}]
    with pytest.raises(BundleFormatError, match=r"kind: unknown key 'routing'"):
        read_manifest(json.dumps(data).encode(), "m")
