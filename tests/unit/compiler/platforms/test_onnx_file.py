"""Submodels as plain ONNX files: opened by onnxruntime alone, equal to the bundle's engine; what is refused."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import onnx
import onnxruntime
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.manifest import MANIFEST_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.platforms import onnx_file
from nestforge.compiler.platforms.onnx_file import export_onnx
from nestforge.errors import BundleCorruptError, BundleIncompatibleError, OutputError, ParityError, SelectionError
from nestforge.exporters.checkpoints.checkpoint import sha256_of
from support.generating import generating_folder
from support.tiny_compile import board

BERT = Path(__file__).parents[3] / "golden" / "peft" / "bert"
EXPECTED = np.load(BERT / "expected.npz")
FEEDS = {
    "input_ids": EXPECTED["ids"],
    "attention_mask": np.ones_like(EXPECTED["ids"]),
    "token_type_ids": np.zeros_like(EXPECTED["ids"]),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two submodels, in float32 and with integer products, at a shape and at a range."""
    levels: Any = {"ffn": (0.5, 1.0), "heads": (0.5, 1.0)}
    profile = board(budgets={"full": {}}, buckets=["2x8", "1..2x1..8"])
    return compile_bundle(
        BERT / "base",
        profile,
        tmp_path_factory.mktemp("onnx") / "b",
        levels=levels,
        precisions=("fp32", "int8-dynamic"),
    )


@pytest.fixture(scope="module")
def with_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    levels: Any = {"ffn": (0.5, 1.0), "heads": (0.5, 1.0)}
    profile = board(budgets={"full": {}}, buckets=["2x8"])
    return compile_bundle(
        BERT / "base", profile, tmp_path_factory.mktemp("onnx") / "t", levels=levels, tasks={"b": BERT / "b"}
    )


def answers(path: Path, level: Any = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL) -> dict[str, Any]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    assert {one.name for one in session.get_inputs()} == FEEDS.keys()
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(None, FEEDS), strict=True))


@pytest.mark.parametrize("submodel", ["50%", "100%", "50%.int8-dynamic", "100%.int8-dynamic"])
@pytest.mark.parametrize("bucket", ["2x8", "1..2x1..8"])
def test_a_file_answers_as_the_engine(bundle: Path, tmp_path: Path, submodel: str, bucket: str) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    path = folder / "model.onnx"
    found = export_onnx(bundle, path, submodel=submodel, bucket=Bucket.parse(bucket))
    assert [*folder.iterdir()] == [path]
    assert found.parity.max_abs < 1e-4, "with packed weights and ONNX Runtime's own options"
    assert (found.files, found.bytes) == ((str(path),), path.stat().st_size)
    manifest = open_bundle(bundle).manifest
    (engine,) = (
        one
        for one in manifest.engines
        if one.submodel == manifest.submodel(submodel).id and one.bucket == Bucket.parse(bucket)
    )
    with nestforge.load(bundle, residency="shared") as model:
        runner = model._pool.get(engine)
        names = [spec.name for spec in manifest.outputs]
        for name, array in zip(names, runner.run(FEEDS), strict=True):
            np.testing.assert_array_equal(answers(path)[name], array)
    model_proto = onnx.load(path)
    assert all(tensor.data_location != onnx.TensorProto.EXTERNAL for tensor in model_proto.graph.initializer)
    assert {one.key: one.value for one in model_proto.metadata_props} == {
        "nestforge.bundle": manifest.name,
        "nestforge.manifest_sha256": sha256_of(bundle / MANIFEST_NAME),
        "nestforge.submodel": engine.submodel,
        "nestforge.bucket": bucket,
        "nestforge.precision": engine.precision,
        "nestforge.engine_sha256": sha256_of(bundle / engine.file),
    }


def test_views_are_of_the_submodel_s_shape(bundle: Path, tmp_path: Path) -> None:
    small, large = tmp_path / "small.onnx", tmp_path / "large.onnx"
    for path, submodel in ((small, "50%"), (large, "100%")):
        export_onnx(bundle, path, submodel=submodel, bucket=Bucket(2, 8))
    half, whole = (
        {tensor.name: tuple(tensor.dims) for tensor in onnx.load(path).graph.initializer} for path in (small, large)
    )
    name = "encoder.layer.0.intermediate.dense.bias"
    assert (half[name], whole[name]) == ((16,), (32,))
    assert small.stat().st_size < large.stat().st_size


def test_many_weights_lie_beside_the_file(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, apart = tmp_path / "inside.onnx", tmp_path / "apart.onnx"
    export_onnx(bundle, inside, submodel="50%", bucket=Bucket(2, 8))
    monkeypatch.setattr(onnx_file, "_MOST_INSIDE", 1000)
    found = export_onnx(bundle, apart, submodel="50%", bucket=Bucket(2, 8))
    assert found.files == (str(apart), f"{apart}.data")
    assert apart.stat().st_size < inside.stat().st_size / 2
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in found.files:
        Path(file).rename(moved / Path(file).name)
    for name, array in answers(inside).items():
        np.testing.assert_array_equal(answers(moved / apart.name)[name], array)
    for tensor in onnx.load(moved / apart.name, load_external_data=False).graph.initializer:
        places = {entry.key: entry.value for entry in tensor.external_data}
        assert int(places.get("offset", 0)) % 64 == 0


def test_a_task_is_in_the_weights(with_task: Path, tmp_path: Path) -> None:
    """PEFT's own answers with the adapter; without a task the base's."""
    for task in ("b", None):
        path = tmp_path / f"{task}.onnx"
        export_onnx(with_task, path, task=task)
        with nestforge.load(with_task, residency="shared") as model:
            own = model(FEEDS, task=task)["last_hidden_state"]
        np.testing.assert_array_equal(answers(path)["last_hidden_state"], own)
    plain = answers(tmp_path / "b.onnx", onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)
    np.testing.assert_allclose(plain["last_hidden_state"], EXPECTED["b"], atol=5e-5)


def test_each_refusal_leaves_nothing(bundle: Path, with_task: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "model.onnx"
    out.parent.mkdir()
    with pytest.raises(SelectionError, match=r"submodel ffn32-heads2: has .*2x8.*; name one with `bucket`"):
        export_onnx(bundle, out)
    with pytest.raises(SelectionError, match=r"submodel ffn16-heads1: has .*2x8.*; got 4x8"):
        export_onnx(bundle, out, submodel="50%", bucket=Bucket(4, 8))
    with pytest.raises(SelectionError, match="no submodel 'Q' in this bundle"):
        export_onnx(bundle, out, submodel="Q")
    with pytest.raises(SelectionError, match="no task 'a' in bundle"):
        export_onnx(with_task, out, task="a")
    with pytest.raises(OutputError, match="no such folder"):
        export_onnx(bundle, tmp_path / "missing" / "model.onnx")
    assert not [*out.parent.iterdir()]
    for name in ("model.onnx", "model.onnx.data"):
        (out.parent / name).write_text("mine")
        with pytest.raises(OutputError, match=rf"{name}: exists already"):
            export_onnx(bundle, out, bucket=Bucket(2, 8))
        assert (out.parent / name).read_text() == "mine"
        (out.parent / name).unlink()


def test_engines_for_other_back_ends(bundle: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those for TensorRT are proven as graphs, and written; what no kernel of ONNX Runtime proved is refused."""
    graphs = generating_folder(tmp_path_factory) / "graphs"
    found = export_onnx(graphs, tmp_path / "graph.onnx")
    assert found.parity.max_abs < 1e-4
    opened = open_bundle(bundle)
    for change, title in (
        ({"backend": "openvino"}, "OpenVINO"),
        ({"backend": "tensorrt", "precision": "bf16"}, "TensorRT"),
    ):
        engines = tuple(replace(one, **change) for one in opened.manifest.engines)
        other = replace(opened, manifest=replace(opened.manifest, engines=engines))
        with pytest.raises(BundleIncompatibleError, match=rf"was proven for {title}, never by ONNX Runtime's own"):
            onnx_file.chosen_engine(other, None, Bucket(2, 8))


def test_a_file_that_answers_otherwise_is_not_left(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of the written file is off by its last bit: far within the tolerance, and refused."""
    write = onnx_file._write

    def damaged(*arguments: Any) -> list[Path]:
        files = write(*arguments)
        model = onnx.load(files[0])
        (tensor,) = (one for one in model.graph.initializer if one.name.endswith("word_embeddings.weight"))
        tensor.raw_data = (np.frombuffer(tensor.raw_data, np.uint32) ^ 1).tobytes()
        onnx.save(model, files[0])
        return files

    monkeypatch.setattr(onnx_file, "_write", damaged)
    with pytest.raises(ParityError, match=r"the written file is off by .* with the same kernels"):
        export_onnx(bundle, tmp_path / "model.onnx", submodel="50%", bucket=Bucket(2, 8))
    assert not [*tmp_path.iterdir()]


def test_one_that_appears_meanwhile_stays(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the ONNX file is taken while it is compared: the weights, which were there, go again."""
    monkeypatch.setattr(onnx_file, "_MOST_INSIDE", 1000)
    compared = onnx_file._compared
    path = tmp_path / "model.onnx"

    def slow(*arguments: Any) -> Any:
        path.write_text("mine")
        return compared(*arguments)

    monkeypatch.setattr(onnx_file, "_compared", slow)
    with pytest.raises(OutputError, match=r"model\.onnx: exists already"):
        export_onnx(bundle, path, submodel="50%", bucket=Bucket(2, 8))
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_a_damaged_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    store = bytearray((copy / WEIGHTS_NAME).read_bytes())
    store[-1] ^= 1
    (copy / WEIGHTS_NAME).write_bytes(store)
    with pytest.raises(BundleCorruptError, match=r"weights\.safetensors: sha256"):
        export_onnx(copy, tmp_path / "model.onnx", bucket=Bucket(2, 8))
    assert not (tmp_path / "model.onnx").exists()
