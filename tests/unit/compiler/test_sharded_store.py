"""A bundle whose weight store lies in several files: made, stopped and taken up, run, verified, exported, damaged."""

import errno
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from nestforge.bundle.files import weight_names, weights_in
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.graph import store
from nestforge.compiler.platforms import onnx_file
from nestforge.compiler.platforms.onnx_file import export_onnx
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import BundleCorruptError, BundleFormatError, OutputError
from nestforge.runtime.load import load, verify_bytes
from safetensors.numpy import load_file
from support.generating import save_text_llama
from support.sealing import edit_manifest
from support.tiny_compile import board

PROFILE = board(budgets={"full": {}}, buckets=["1x1..16"])
OPTIONS: Mapping[str, Any] = {"generate": True, "levels": {"ffn": (1.0,)}}
MOST = 20_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_llama(tmp_path_factory.mktemp("sharded") / "model")


@pytest.fixture(scope="module")
def whole(model: Path) -> Path:
    """The bundle with one file."""
    return compile_bundle(model, PROFILE, model.parent / "whole", **OPTIONS)


@pytest.fixture(scope="module")
def bundle(model: Path) -> Path:
    """The same in several, with integers too. Only to be read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "MOST_BYTES", MOST)
        return compile_bundle(model, PROFILE, model.parent / "sharded", precisions=("fp32", "int4"), **OPTIONS)


@pytest.fixture
def own(bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bundle, tmp_path / "own")


def test_each_tensor_lies_in_one_of_the_files(bundle: Path, whole: Path) -> None:
    (one,), files = weights_in(whole), weights_in(bundle)
    assert len(files) > 2
    assert tuple(path.name for path in files) == weight_names(len(files))
    found = [load_file(path) for path in files]
    tensors: dict[str, np.ndarray] = {name: array for each in found for name, array in each.items()}
    assert sum(map(len, found)) == len(tensors)
    expected = load_file(one)
    assert expected.keys() < tensors.keys(), "integers come on top"
    assert all(np.array_equal(tensors[name], expected[name]) for name in expected)
    assert all(sum(array.nbytes for array in each.values()) <= MOST or len(each) == 1 for each in found)


@pytest.mark.parametrize("residency", ["shared", "packed", "mapped"])
def test_it_answers_and_writes_as_the_one_of_one_file(bundle: Path, whole: Path, residency: Any) -> None:
    feeds = {"input_ids": np.arange(7)[None]}
    with load(bundle, residency=residency, threads=1) as ours, load(whole, residency=residency, threads=1) as plain:
        for submodel in (entry.id for entry in plain.bundle.manifest.submodels):
            here, there = (each(feeds, submodel=submodel)["logits"] for each in (ours, plain))
            assert np.array_equal(here, there)
        if residency == "mapped":
            return  # such engines do not generate
        here, there = (each.generate([3, 1, 4], max_tokens=6).rows[0].tokens for each in (ours, plain))
        assert here == there


def test_every_engine_is_verified_against_the_model(bundle: Path, model: Path) -> None:
    report = verify_bundle(bundle, against=model)
    assert report, report.engines
    assert len(report.engines) == 4, "of two precisions, whole and with a cache"
    parity = [engine.parity for engine in open_bundle(bundle).manifest.every_engine]
    assert {receipt.weights_sha256 for receipt in parity if receipt} == {open_bundle(bundle).manifest.weights_sha256}


@pytest.mark.parametrize("most_inside", [onnx_file._MOST_INSIDE, 0])
def test_a_submodel_is_exported(
    bundle: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_inside: int
) -> None:
    monkeypatch.setattr(onnx_file, "_MOST_INSIDE", most_inside)  # a file beside, as of more than 2 GB
    answers = []
    for number, each in enumerate((bundle, whole)):
        path = tmp_path / f"{number}.onnx"
        export_onnx(each, path)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        answers.append(session.run(None, {"input_ids": np.arange(7)[None]})[0])
    assert np.array_equal(*answers)


def missing(path: Path) -> None:
    path.unlink()


def cut_short(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def changed(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "said"), [(missing, "missing"), (cut_short, "bytes, expected"), (changed, "sha256")]
)
@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_damaged_file_is_named(own: Path, damage: Callable[[Path], None], said: str, number: int) -> None:
    path = weights_in(own)[number]
    damage(path)
    with pytest.raises(BundleCorruptError, match=rf"{path.name}.*{said}") as refusal:
        verify_bytes(own)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_cut_while_engines_read_it_is_named(own: Path) -> None:
    with load(own, residency="shared", threads=1) as opened:
        opened({"input_ids": np.arange(7)[None]})
        cut_short(weights_in(own)[0])
        with pytest.raises(BundleCorruptError, match=rf"{weights_in(own)[0].name}: written to or cut short while"):
            opened({"input_ids": np.arange(7)[None]})


def unlist(bundle: Path, files: Sequence[Path]) -> None:
    names = {path.name for path in files}

    def edit(manifest: dict[str, Any]) -> None:
        manifest["files"] = [entry for entry in manifest["files"] if entry["path"] not in names]

    edit_manifest(bundle, edit)


def test_a_manifest_without_one_of_the_files_is_refused(own: Path) -> None:
    unlist(own, weights_in(own)[1:2])
    with pytest.raises(BundleFormatError, match="files of the weight store: weights-00001-of-"):
        open_bundle(own)


def test_an_engine_that_reads_an_unlisted_file_is_refused(own: Path) -> None:
    """A graph is hashed, so that somebody made the manifest so."""
    unlist(own, weights_in(own))
    with pytest.raises(
        BundleCorruptError, match=r"reads weights-0000\d-of-\d+.safetensors, which the bundle does not li"
    ):
        load(own, threads=1)({"input_ids": np.arange(7)[None]})


@pytest.mark.parametrize(
    ("failure", "raised", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            OutputError,
            "the disk is full; nothing was publish",
        ),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_compile_that_was_stopped_within_a_file_rewrites_no_finished_one(
    bundle: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    raised: type[BaseException],
    said: str | None,
) -> None:
    write, written = store.write_tensors, list[str]()

    def stopped(tensors: Any, path: Path, metadata: Mapping[str, str]) -> None:
        write(tensors, path, metadata)
        written.append(path.name.removesuffix(".writing"))
        if len(written) == 3:
            cut_short(path)
            raise failure

    monkeypatch.setattr(store, "MOST_BYTES", MOST)
    monkeypatch.setattr(store, "write_tensors", stopped)
    with pytest.raises(raised, match=said):
        compile_bundle(model, PROFILE, tmp_path / "b", **OPTIONS)
    stage = tmp_path / "b.partial" / "output"
    finished = [path.name for path in weights_in(stage)]
    assert finished == written[:2]
    cut_short(stage / finished[1])  # as by a file system that lost its end
    before = (stage / finished[0]).stat()
    compile_bundle(model, PROFILE, tmp_path / "b", **OPTIONS)
    assert (tmp_path / "b" / finished[0]).stat().st_ino == before.st_ino
    assert written[3:5] == finished[1:] + written[2:3]
    assert finished[0] not in written[3:]
    assert verify_bundle(tmp_path / "b", against=model)
