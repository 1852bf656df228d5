from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.compiler.build.build_engine import EngineBuilder
from nestforge.compiler.graph.precision.proof_graphs import (
    for_backend,
    in_onnx_runtime,
    is_emulation,
    proof_bundle,
    proof_file,
)
from nestforge.elastic import Bucket
from nestforge.runtime.bundle.manifest import EngineEntry
from nestforge.runtime.bundle.open_bundle import Bundle


@pytest.fixture
def bundle(builder: EngineBuilder) -> Bundle:
    """Two engines, of which one is in bfloat16; both for TensorRT."""
    one = EngineEntry("a@b1-s8", "a", Bucket(1, 8), "tensorrt", "a.b1-s8.onnx", "sliced", 0, 0, 0, 0)
    engines = (one, replace(one, id="b@b1-s8", submodel="b", file="b.b1-s8.onnx", precision="bf16"))
    return replace(builder.draft, manifest=replace(builder.draft.manifest, engines=engines))


def test_only_an_engine_in_bfloat16_is_emulated(bundle: Bundle) -> None:
    files = [proof_file(engine) for engine in bundle.manifest.engines]
    assert files == ["a.b1-s8.onnx", "b.b1-s8.emulation.onnx"]
    assert [is_emulation(file) for file in files] == [False, True]


def test_engines_go_to_the_host_and_back(bundle: Bundle) -> None:
    here = in_onnx_runtime(bundle)
    assert [(e.backend, e.file) for e in here.manifest.engines] == [
        ("onnxruntime", "a.b1-s8.onnx"),
        ("onnxruntime", "b.b1-s8.emulation.onnx"),
    ]
    assert {e.id for e in here.manifest.engines} == {e.id for e in bundle.manifest.engines}
    assert for_backend(bundle, "onnxruntime").manifest.engines[1].file == "b.b1-s8.onnx", "a device has no emulations"


def test_a_bundle_without_bfloat16_is_not_copied(bundle: Bundle) -> None:
    plain = replace(bundle, manifest=replace(bundle.manifest, engines=bundle.manifest.engines[:1]))
    with proof_bundle(plain) as here:
        assert here.path == plain.path
        assert here.manifest.engines[0].backend == "onnxruntime"


def test_emulations_lie_in_a_copy_that_is_gone_afterwards(builder: EngineBuilder, bundle: Bundle) -> None:
    whole = builder.universal.spec.universal()
    engine = builder.build(whole, next(iter(builder.cases)))
    for file in ("a.b1-s8.onnx", "b.b1-s8.onnx"):
        (bundle.path / file).write_bytes((bundle.path / engine.file).read_bytes())
    with proof_bundle(bundle) as here:
        copied: Path = here.path
        assert copied != bundle.path
        assert {engine.file for engine in here.manifest.engines} <= {path.name for path in copied.iterdir()}
    assert not copied.exists()
