import hashlib
import json
import os
from pathlib import Path

import pytest
from nestforge.bundle.manifest import Quality
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.write_bundle import write_manifest, written_bundle
from nestforge.errors import BundleCorruptError
from support.tiny_compile import BUCKET, write_levels


def test_a_bundle_that_is_written_opens(builder: EngineBuilder) -> None:
    quality = Quality(20, {"mean_cosine": 0.9, "recall_at_10": 0.8}, "0" * 64)
    bundle = open_bundle(write_levels(builder, {"ffn8-heads1": quality}), check="full")
    manifest = bundle.manifest
    assert [entry.labels for entry in manifest.submodels] == [("S",), ("M",), ("L",), ("XL",)]
    assert manifest.submodel("S").quality == quality
    assert manifest.submodel("XL").quality is None
    assert [engine.submodel for engine in manifest.engines] == [entry.id for entry in manifest.submodels]
    assert {budget.name for budget in manifest.budgets} == {"full", "half"}
    assert (manifest.family, manifest.name, manifest.trained_nested) == ("bert", "bert", False)


def test_every_file_is_listed_with_its_own_bytes(builder: EngineBuilder) -> None:
    folder = write_levels(builder)
    manifest = open_bundle(folder).manifest
    listed = {entry.path: (entry.bytes, entry.sha256) for entry in manifest.files}
    expected = {"weights.safetensors", "tokenizer.json", *(engine.file for engine in manifest.engines)}
    assert list(listed) == sorted(expected)
    for name, figures in listed.items():
        raw = (folder / name).read_bytes()
        assert figures == (len(raw), hashlib.sha256(raw).hexdigest())


def test_receipts_carry_the_hashes_of_what_was_compared(builder: EngineBuilder) -> None:
    folder = write_levels(builder)
    manifest = open_bundle(folder).manifest
    hashes = {entry.path: entry.sha256 for entry in manifest.files}
    for engine in manifest.engines:
        assert engine.parity.graph_sha256 == hashes[engine.file]
        assert engine.parity.weights_sha256 == hashes["weights.safetensors"]


def test_what_is_not_what_the_gate_proved_is_found_when_it_is_read(builder: EngineBuilder) -> None:
    """The manifest states the receipts' hashes, and never those of files that changed since."""
    bundle = open_bundle(write_levels(builder))
    with bundle.file("weights.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    write_manifest(builder.stage, bundle, ())
    with pytest.raises(BundleCorruptError, match=r"weights\.safetensors"):
        written_bundle(builder.stage, bundle.build)


def test_figures_of_a_submodel_follow_from_its_files(builder: EngineBuilder) -> None:
    manifest = open_bundle(write_levels(builder)).manifest
    universal = manifest.submodel("XL")
    weights = sum(parameter.numel() for parameter in builder.universal.parameters().values())
    assert (universal.parameters, universal.weight_bytes) == (weights, 4 * weights)
    small = manifest.submodel("S")
    narrowed = builder.universal.narrow(builder.universal.spec.parse(small.id))
    assert small.parameters == sum(parameter.numel() for parameter in narrowed.parameters())


def test_engines_that_were_only_measured_are_left_out(builder: EngineBuilder) -> None:
    extra = builder.build(builder.universal.spec.parse("ffn16_24-heads1"), BUCKET)
    folder = write_levels(builder)
    assert not (folder / extra.file).exists()
    assert extra.file not in {entry.path for entry in open_bundle(folder).manifest.files}


def test_the_manifest_is_the_same_every_time_and_holds_no_time_or_place(builder: EngineBuilder) -> None:
    folder = write_levels(builder)
    first = (folder / "manifest.json").read_bytes()
    again = (write_levels(builder) / "manifest.json").read_bytes()
    assert first == again
    assert str(folder.parent).encode() not in first
    assert os.uname().nodename.encode() not in first


def test_the_build_record_names_the_manifest_it_belongs_to(builder: EngineBuilder) -> None:
    folder = write_levels(builder)
    record = json.loads((folder / "build.json").read_bytes())
    assert record["manifest_sha256"] == hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert record["command"] == ["nestforge", "compile"]
    assert record["seconds"] == {"build": 1.5}
    assert [entry["engine"] for entry in record["latencies"]] == [
        engine.id for engine in open_bundle(folder).manifest.engines
    ]
    assert "measured_p50_ms" not in (folder / "build.json").read_text()


def test_provenance_is_enough_to_make_it_again(builder: EngineBuilder, tiniest: Path) -> None:
    provenance = open_bundle(write_levels(builder)).manifest.provenance
    paths = [entry.path for entry in provenance.source]
    assert paths == ["1_Pooling/config.json", "config.json", "model.safetensors", "modules.json", "tokenizer.json"]
    for entry in provenance.source:
        assert entry.sha256 == hashlib.sha256((tiniest / entry.path).read_bytes()).hexdigest()
    assert provenance.profile["name"] == "board"
    assert {"python", "nestforge", "torch", "transformers", "onnx", "onnxruntime", "numpy"} <= provenance.tools.keys()
