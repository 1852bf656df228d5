from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.graph.precision.proof_graphs import link, proof_bundle, proof_graph, with_proof_graphs
from nestforge.profiles.precision import Precision


@pytest.fixture
def bundle(builder: EngineBuilder) -> Bundle:
    """Two engines, of which one is in bfloat16; both for TensorRT."""
    one = EngineEntry("a@b1-s8", "a", Bucket(1, 8), "tensorrt", "a.b1-s8.onnx", "sliced", 0, 0, 0, 0)
    engines = (one, replace(one, id="b@b1-s8", submodel="b", file="b.b1-s8.onnx", precision="bf16"))
    return replace(builder.draft, manifest=replace(builder.draft.manifest, engines=engines))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int8-dynamic", "int4"])
def test_every_engine_but_one_in_bfloat16_is_proven_by_its_own_graph(precision: Precision) -> None:
    assert proof_graph(b"a graph", precision) == b"a graph"


def test_proof_graphs_run_in_onnx_runtime_under_the_names_of_their_engines(bundle: Bundle, tmp_path: Path) -> None:
    here = with_proof_graphs(bundle, tmp_path)
    assert here.path == tmp_path
    assert [(engine.backend, engine.file) for engine in here.manifest.engines] == [
        ("onnxruntime", "a.b1-s8.onnx"),
        ("onnxruntime", "b.b1-s8.onnx"),
    ]


def test_a_bundle_without_bfloat16_is_not_copied(bundle: Bundle) -> None:
    plain = replace(bundle, manifest=replace(bundle.manifest, engines=bundle.manifest.engines[:1]))
    with proof_bundle(plain) as here:
        assert here.path == plain.path
        assert here.manifest.engines[0].backend == "onnxruntime"


def test_emulations_lie_in_a_folder_that_is_gone_afterwards(builder: EngineBuilder, bundle: Bundle) -> None:
    whole = builder.universal.spec.universal()
    engine = builder.build(whole, next(iter(builder.cases)))
    for file in ("a.b1-s8.onnx", "b.b1-s8.onnx"):
        (bundle.path / file).write_bytes((bundle.path / engine.file).read_bytes())
    with proof_bundle(bundle) as here:
        folder: Path = here.path
        assert folder != bundle.path
        assert {engine.file for engine in here.manifest.engines} <= {path.name for path in folder.iterdir()}
    assert not folder.exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_link_replaces_what_an_interrupted_run_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    source, target = tmp_path / "weights", tmp_path / "link"
    source.write_bytes(b"weights")
    target.write_bytes(b"wei")
    if not has_links:

        def refuse(*_paths: Path) -> None:
            raise PermissionError

        monkeypatch.setattr(os, "link", refuse)
    link(source, target)
    assert target.read_bytes() == b"weights"
    assert target.samefile(source) == has_links


def test_proof_graphs_never_lie_in_the_bundle(builder: EngineBuilder) -> None:
    engine = builder.build(builder.universal.spec.universal(), next(iter(builder.cases)))
    assert (builder.proofs.path / engine.file).samefile(builder.stage.folder / engine.file)
    assert builder.proofs.path.parent == builder.stage.work
    assert {path.name for path in builder.stage.folder.glob("*.onnx")} == {engine.file}
