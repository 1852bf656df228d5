import hashlib
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.examples import rank_axes as module
from nestforge.compiler.examples.corpus import ArrayCorpus, Corpus
from nestforge.compiler.examples.rank_axes import permuted, rank_axes
from nestforge.compiler.work.clock import Clock
from nestforge.compiler.work.staging import Stage
from nestforge.errors import CheckpointError, InputError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.progress import silent
from nestforge.runtime.consistency.samples import ArraySamples
from safetensors import safe_open
from safetensors.numpy import load_file
from support.tiny_compile import board, save_tiniest
from support.tiny_matlm import save_tiny_matlm
from support.tiny_mixer import save_tiny_mixer
from support.tokenizer_files import WORDS, word_tokenizer

CORPUS = Corpus(tuple(f"the {a} jumps over {b}" for a, b in pairwise(WORDS)), ("held out",))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path / "stage", tmp_path / "stage" / "work")
    stage.work.mkdir(parents=True)
    return stage


@pytest.fixture
def copy(tiniest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiniest, tmp_path / "model"))


def weights(model: UniversalModel) -> list[torch.Tensor]:
    return [parameter.clone() for parameter in model.parameters().values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def load(folder: Path) -> UniversalModel:
    return load_universal(open_source(folder))


@pytest.mark.parametrize("corpus", [None, CORPUS], ids=["no text", "text"])
def test_a_nested_model_keeps_its_order(copy: Path, stage: Stage, corpus: Corpus | None) -> None:
    config = json.loads((copy / "config.json").read_text()) | {"nested": True}
    (copy / "config.json").write_text(json.dumps(config))
    model = load(copy)
    before = weights(model)
    ranking = rank_axes(model, corpus, stage, Clock(silent))
    assert (ranking.method, ranking.order_sha256, ranking.samples) == ("none", None, None)
    assert same(before, weights(model))


@pytest.mark.parametrize("corpus", [None, CORPUS], ids=["no text", "text"])
def test_nothing_is_ranked_where_no_axis_has_weights(tmp_path: Path, stage: Stage, corpus: Corpus | None) -> None:
    model = load(save_tiny_mixer(tmp_path / "m", router="tokens_choose"))  # whose capacity and group are axes
    before = weights(model)
    ranking = rank_axes(model, corpus, stage, Clock(silent))
    assert (ranking.method, ranking.order_sha256, ranking.samples) == ("none", None, None)
    assert same(before, weights(model))


def test_without_text_magnitude_decides(tiniest: Path, stage: Stage) -> None:
    model = load(tiniest)
    ranking = rank_axes(model, None, stage, Clock(silent))
    assert (ranking.method, ranking.data_sha256, ranking.samples) == ("magnitude", None, None)
    assert len(ranking.order_sha256 or "") == 64


def test_with_text_taylor_decides_and_says_from_what(tiniest: Path, stage: Stage) -> None:
    events: list[tuple[int, int]] = []
    model = load(tiniest)
    ranking = rank_axes(model, CORPUS, stage, Clock(lambda _, done, total: events.append((done, total))))
    assert (ranking.method, ranking.samples) == ("taylor", len(CORPUS.calibration))
    assert events == [(1, 2), (2, 2)], "23 texts are two batches of at most 16"
    other = rank_axes(load(tiniest), Corpus(CORPUS.calibration[:-1], ()), _fresh(stage), Clock(silent))
    assert other.data_sha256 != ranking.data_sha256
    assert rank_axes(load(tiniest), None, stage, Clock(silent)).order_sha256 != ranking.order_sha256


def test_rows_of_arrays_rank_as_their_texts_do(tiniest: Path, stage: Stage) -> None:
    one, other = load(tiniest), load(tiniest)
    encoder = one.source.encoder
    texts = Corpus(CORPUS.calibration[:16], ())  # one batch, so that both are padded alike
    data = ArraySamples(encoder.encode(sorted(texts.calibration, key=len), 64).feeds)
    by_text = rank_axes(one, texts, stage, Clock(silent))
    by_rows = rank_axes(other, ArrayCorpus(data, data), _fresh(stage), Clock(silent))
    assert (by_rows.method, by_rows.samples, by_rows.data_sha256) == ("taylor", 16, data.sha256)
    assert by_rows.order_sha256 == by_text.order_sha256
    assert same(weights(one), weights(other))


def test_rows_that_are_longer_than_the_model_takes(tmp_path: Path, stage: Stage) -> None:
    model = load(save_tiniest(tmp_path / "short", max_position_embeddings=6))
    feeds = {spec.name: np.ones((3, 7), np.int64) for spec in model.source.signature.inputs}
    with pytest.raises(InputError, match="rows have 7 positions, the model takes at most 6; cut them"):
        rank_axes(model, ArrayCorpus(ArraySamples(feeds), ArraySamples(feeds)), stage, Clock(silent))


def test_ranking_is_the_same_every_time(tiniest: Path, stage: Stage) -> None:
    one, other = load(tiniest), load(tiniest)
    assert rank_axes(one, CORPUS, stage, Clock(silent)) == rank_axes(other, CORPUS, _fresh(stage), Clock(silent))
    assert same(weights(one), weights(other))


def test_scores_of_an_interrupted_compile_are_used(
    tiniest: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = load(tiniest), load(tiniest)
    first = rank_axes(one, CORPUS, stage, Clock(silent))
    monkeypatch.setattr(module, "taylor_scores", lambda *_: pytest.fail("computed again"))
    assert rank_axes(other, CORPUS, stage, Clock(silent)) == first
    assert same(weights(one), weights(other))


@pytest.mark.parametrize("nested", [False, True])
def test_text_for_a_model_without_tokenizer_is_refused(copy: Path, stage: Stage, nested: bool) -> None:
    """Also where no ranking needs it: the user expects to see quality."""
    config = json.loads((copy / "config.json").read_text()) | {"nested": nested}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"model: no tokenizer.json, so the text file cannot be read"):
        rank_axes(load(copy), CORPUS, stage, Clock(silent))
    assert load(copy).source.encoder is None


def test_a_tokenizer_that_knows_more_than_the_model(tmp_path: Path, stage: Stage) -> None:
    folder = save_tiniest(tmp_path / "small", vocab_size=10)
    word_tokenizer(64).save(str(folder / "tokenizer.json"))
    with pytest.raises(InputError, match=r"^text 0: the tokenizer gives \d+ for input_ids, which takes 0\.\.9"):
        rank_axes(load(folder), CORPUS, stage, Clock(silent))


def test_long_texts_are_cut_to_what_the_model_takes(tmp_path: Path, stage: Stage) -> None:
    folder = save_tiniest(tmp_path / "short", max_position_embeddings=6)
    long = Corpus((" ".join(WORDS), "the fox"), ())
    assert rank_axes(load(folder), long, stage, Clock(silent)).samples == 2


def _fresh(stage: Stage) -> Stage:
    folder = stage.folder.with_name("fresh")
    folder.mkdir()
    return Stage(folder, folder)


def compiled(folder: Path, name: str = "bundle", sequence: int = 8) -> Path:
    profile = board(budgets={"full": {}})
    return compile_bundle(folder, profile, folder.with_name(name), buckets=[Bucket(1, sequence)])


def tensor_of(folder: Path, parameter: str) -> np.ndarray:
    """The checkpoint's own tensor, with or without a base model's prefix."""
    tensors = load_file(folder / "model.safetensors")
    (found,) = [array for name, array in tensors.items() if name == parameter or name.endswith(f".{parameter}")]
    return found.astype(np.float32)


def stated(bundle: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, np.ndarray]]:
    with safe_open(bundle / "ranking.safetensors", framework="np") as file:
        slices = json.loads(file.metadata()["slices"])
    return slices, load_file(bundle / "ranking.safetensors")


def in_order(array: np.ndarray, slices: list[dict[str, Any]], orders: dict[str, np.ndarray]) -> np.ndarray:
    for entry in slices:
        steps = np.moveaxis(array, entry["dim"], 0)
        blocks = steps.reshape(-1, entry["unit"], *steps.shape[1:])[orders[entry["order"]]]
        array = np.moveaxis(blocks.reshape(steps.shape), 0, entry["dim"])
    return array


@pytest.fixture(
    scope="module",
    params=[
        lambda folder: save_tiniest(folder),
        lambda folder: save_tiny_matlm(
            folder, nested=False, nested_heads=True, position="relative_bias", bias=True, norm_weights=True
        ),
        lambda folder: save_tiny_mixer(folder, capacities=(100,)),
    ],
    ids=["bert", "matlm", "sparse-mixer"],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("ranked") / "m")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    mixer = config["model_type"] == "sparse_mixer"
    return compiled(folder, sequence=config["max_position_embeddings"] if mixer else 8)


def test_every_weight_is_the_checkpoints_in_the_order_that_the_bundle_states(folder: Path, bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["ranking"]["order_file"] == "ranking.safetensors"
    listed = {entry["path"]: entry["sha256"] for entry in manifest["files"]}
    assert listed["ranking.safetensors"] == hashlib.sha256((bundle / "ranking.safetensors").read_bytes()).hexdigest()
    slices, orders = stated(bundle)
    assert {order.dtype for order in orders.values()} == {np.dtype(np.int32)}
    assert all(sorted(order) == list(range(len(order))) for order in orders.values())
    stored = {k: v for k, v in load_file(bundle / "weights.safetensors").items() if not k.startswith("table.")}
    moved = 0
    for name, array in stored.items():
        parameter = name.removesuffix(".T")
        own = tensor_of(folder, parameter)
        expected = in_order(own, slices.get(parameter, []), orders)
        assert np.ascontiguousarray(expected.T if name.endswith(".T") else expected).tobytes() == array.tobytes(), name
        moved += expected.tobytes() != own.tobytes()
    assert moved > 4
    assert slices.keys() <= {name.removesuffix(".T") for name in stored}


def test_an_engine_reads_the_first_steps_of_them(folder: Path, bundle: Path) -> None:
    """The bytes of the store that the least submodel's engine names are those steps of the checkpoint."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    slices, orders = stated(bundle)
    graph = onnx.load(bundle / manifest["engines"][0]["file"], load_external_data=False).graph
    store, checked = (bundle / "weights.safetensors").read_bytes(), 0
    for tensor in graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        parameter = tensor.name.removesuffix(".T")
        if parameter not in slices or not place:
            continue
        whole = in_order(tensor_of(folder, parameter), slices[parameter], orders)
        kept = np.ascontiguousarray(whole.T if tensor.name.endswith(".T") else whole)[: tensor.dims[0]]
        offset, length = int(place["offset"]), int(place["length"])
        assert store[offset : offset + length] == kept.tobytes(), tensor.name
        checked += 1
    assert checked > 2


def test_the_file_is_the_same_every_time(folder: Path, bundle: Path) -> None:
    again = compiled(folder, "again", _sequence(bundle))
    assert (again / "ranking.safetensors").read_bytes() == (bundle / "ranking.safetensors").read_bytes()


def test_nothing_permuted_no_file(tmp_path: Path) -> None:
    bundle = compiled(save_tiny_matlm(tmp_path / "m"))
    assert not (bundle / "ranking.safetensors").exists()
    assert json.loads((bundle / "manifest.json").read_text())["ranking"] == {"method": "none"}


def test_an_order_that_moves_nothing_is_left_out() -> None:
    places = {"still": torch.arange(3), "moved": torch.tensor([1, 0])}
    found = permuted(places)
    assert list(found) == ["moved"]
    assert (found["moved"].tolist(), found["moved"].dtype) == ([1, 0], np.int32)


def _sequence(bundle: Path) -> int:
    return json.loads((bundle / "manifest.json").read_text())["engines"][0]["bucket"]["sequence"]
