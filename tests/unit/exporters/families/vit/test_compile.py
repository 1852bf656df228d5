"""The whole road of models without text and without sequence: compiled, verified, answered through the runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nestforge
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import WEIGHTS_NAME
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.graph.store import recover_order
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import CheckpointError, InputError
from nestforge.exporters.ranking import permute_axis
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.profiles.load_profile import dump_profile
from nestforge.tools.cli import main
from support.tensorrt_takes import assert_tensorrt_takes
from support.tiny_compile import board
from support.tiny_models import corpus
from support.tiny_vision import CLASSES, cut_ffn, save_tiny_matvit, save_tiny_vit

BUCKETS = [Bucket(1, 1), Bucket(4, 1)]
IMAGES = np.random.default_rng(0).standard_normal((3, 2, 8, 8)).astype(np.float32)
MODELS: dict[str, Callable[[Path], Path]] = {
    "matvit": save_tiny_matvit,
    "vit": lambda folder: cut_ffn(save_tiny_vit(folder), [24, 32]),
}


@pytest.fixture(scope="module", params=list(MODELS))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = MODELS[request.param](tmp_path_factory.mktemp(request.param) / "m")
    return compile_bundle(folder, board(budgets={"full": {}}), folder.with_suffix(".bundle"), buckets=BUCKETS)


def test_every_engine_is_a_slice_of_one_store(bundle: Path) -> None:
    manifest = nestforge.open_bundle(bundle).manifest
    assert [engine.slice_problem for engine in manifest.engines] == [None] * len(manifest.engines)
    assert {engine.bucket for engine in manifest.engines} == set(BUCKETS)
    assert len(manifest.submodels) > 2
    assert all(engine.private_bytes < 2000 for engine in manifest.engines), "no weights outside the store"
    cases = {engine.bucket: engine.parity.cases for engine in manifest.engines if engine.parity}
    assert cases == {BUCKETS[0]: ("random-0", "random-1"), BUCKETS[1]: ("random-0", "random-1", "padded")}
    assert {proof.suite for proof in manifest.proofs} == {"slice"}
    assert_tensorrt_takes(bundle)


def test_answers_are_pytorchs_for_every_submodel(bundle: Path) -> None:
    universal = load_universal(open_source(bundle.with_suffix("")))
    for axis, order in recover_order(bundle / WEIGHTS_NAME, universal).items():
        permute_axis(universal, axis, order)
    with nestforge.load(bundle) as model:
        for entry in model.bundle.manifest.submodels:
            answer = model({"pixel_values": IMAGES}, submodel=entry.id)
            assert answer.bucket == BUCKETS[1]
            assert answer.padding is not None, "three images in a bucket of four"
            expected = universal.narrow(universal.spec.parse(entry.id))(torch.from_numpy(IMAGES))
            for (name, found), output in zip(answer.outputs.items(), expected, strict=True):
                np.testing.assert_allclose(found, output, atol=2e-5, rtol=1e-4, err_msg=f"{entry.id}: {name}")
        with pytest.raises(InputError, match=r"^input pixel_values: expected float32 \[batch, 2, 8, 8\]"):
            model({"pixel_values": IMAGES[:, :, :4]})


def test_the_written_bundle_verifies_against_its_model(bundle: Path) -> None:
    engines = verify_bundle(bundle, bundle.with_suffix("")).engines
    assert len(engines) == len(nestforge.open_bundle(bundle).manifest.engines)
    assert [engine.problem for engine in engines] == [None] * len(engines)


def test_every_command_knows_models_of_images(bundle: Path, tmp_path: Path) -> None:
    images, profile = tmp_path / "images.npz", tmp_path / "board.yaml"
    profile.write_text(dump_profile(board(budgets={"full": {}})))
    np.savez(images, pixel_values=IMAGES)
    for command in (
        ["inspect", str(bundle.with_suffix(""))],
        ["inspect", str(bundle)],
        ["plan", str(bundle.with_suffix("")), "--profile", str(profile)],
        ["verify", str(bundle)],
        ["run", str(bundle), "--inputs", str(images), "--output", str(tmp_path / "answer.npz")],
    ):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
    with np.load(tmp_path / "answer.npz") as answer:
        outputs = nestforge.open_bundle(bundle).manifest.outputs
        assert {name: answer[name].shape for name in answer} == {s.name: s.shape(Bucket(3, 1)) for s in outputs}


def test_images_and_labels_show_what_submodels_keep(tmp_path: Path) -> None:
    folder, data = save_tiny_vit(tmp_path / "m", task="ForImageClassification"), tmp_path / "images.npz"
    rng = np.random.default_rng(0)
    np.savez(data, pixel_values=rng.standard_normal((250, 2, 8, 8), np.float32), labels=rng.integers(0, CLASSES, 250))
    bundle = compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "b", data=data, buckets=BUCKETS[1:])
    manifest = nestforge.open_bundle(bundle).manifest
    assert manifest.ranking.method == "taylor"
    quality = {entry.id: entry.quality for entry in manifest.submodels}
    expected = {"accuracy", "class_agreement", "kl_small_to_universal", "kl_universal_to_small"}
    assert all(figures is not None and figures.figures.keys() == expected for figures in quality.values())
    universal = quality["ffn32-heads2"]
    assert universal is not None
    assert universal.figures["class_agreement"] == 1
    result = CliRunner().invoke(main, ["consistency", str(bundle), "--data", str(data)])
    assert result.exit_code == 0, result.output


def test_text_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_matvit(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, so the text file cannot be read by this model$"):
        compile_bundle(folder, board(), tmp_path / "b", text=corpus(tmp_path / "text.txt"))
    assert not (tmp_path / "b").exists()
