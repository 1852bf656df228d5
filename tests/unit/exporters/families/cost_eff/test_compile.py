"""The whole road: a folder compiled, every engine and segment held to parity, answers through the runtime."""

import shutil
from pathlib import Path

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.graph import make_template
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import CheckpointError
from nestforge.exporters.source import open_source
from nestforge.exporters.trace import trace
from nestforge.exporters.universal import load_universal
from nestforge.runtime.exits.policy import ExitPolicy
from support.cost_eff_models import CONFIG, SIDECAR, random_weights, save_folder, save_tiny, shapes_of
from support.sealing import edit_manifest
from support.tiny_compile import assert_tensorrt_takes, board
from support.tiny_models import corpus, save_tiny_encoder

IDS = np.random.default_rng(0).integers(4, 60, (4, 8))
MASK = np.array([[1] * 8, [1] * 5 + [0] * 3, [1] * 8, [1] * 2 + [0] * 6])
FEEDS = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": MASK * 0}


def _compiled(folder: Path, **options: object) -> Path:
    return compile_bundle(folder, board(), folder.with_suffix(".bundle"), **options)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("cost_eff") / "m")
    return _compiled(folder, buckets=[Bucket(4, 8)])


def test_every_depth_has_an_engine_and_its_segments_in_shared_files(bundle: Path) -> None:
    manifest = nestforge.open_bundle(bundle).manifest
    assert [entry.labels for entry in manifest.submodels] == [("depth1",), ("depth3",), ("depth4",)]
    assert {engine.emitted for engine in manifest.engines} == {"sliced"}
    segments = {
        entry.labels[0]: [engine.segment for engine in manifest.engines if engine.submodel == entry.id]
        for entry in manifest.submodels
    }
    assert segments == {
        "depth1": [None, "to1"],
        "depth3": [None, "to1", "to3"],
        "depth4": [None, "to1", "to3", "to4"],
    }
    assert len({engine.file for engine in manifest.engines}) == 3 + 3, "three whole engines, three segments"
    deepest = [e for e in manifest.engines if e.submodel == manifest.submodels[-1].id and e.segment]
    read = sum(engine.weight_bytes or 0 for engine in deepest)
    assert read <= manifest.submodels[-1].weight_bytes <= read + 100, (
        "no weight twice, none left out but types' padding"
    )


def test_tensorrt_takes_engines_and_segments(bundle: Path) -> None:
    assert_tensorrt_takes(bundle)


def test_rows_leave_where_pytorch_lets_them(bundle: Path) -> None:
    universal = load_universal(open_source(bundle.with_suffix("")))
    model, inputs = universal.module.model, [torch.from_numpy(array) for array in FEEDS.values()]
    states = model.hidden_states(*inputs)
    answers = {layer: model.answer(layer, states[layer], inputs[1]) for layer in (1, 3, 4)}
    middle = {layer: float(np.median(entropy)) for layer, (_, entropy) in answers.items()}
    with nestforge.load(bundle) as loaded:
        answer = loaded(FEEDS, exits=ExitPolicy((middle[1], middle[3])))
    expected = [
        next(layer for layer in (1, 3, 4) if layer == 4 or answers[layer][1][row] <= middle[layer]) for row in range(4)
    ]
    assert len(set(expected)) > 1
    assert answer.exits.layer.tolist() == expected
    for row, layer in enumerate(expected):
        np.testing.assert_allclose(answer["logits"][row], answers[layer][0][row], atol=1e-4)


def test_proofs_of_every_suite_are_in_the_manifest(bundle: Path) -> None:
    proofs = nestforge.open_bundle(bundle).manifest.proofs
    assert {proof.suite for proof in proofs} == {"load", "decision", "composition", "extremes"}
    assert all(proof.worst <= proof.limit for proof in proofs)
    decisions = [proof for proof in proofs if proof.suite == "decision"]
    assert {proof.subject.split(", ")[1] for proof in decisions} == {"parting thresholds", "the model's own gate"}
    assert sum(proof.checked for proof in decisions) > 50


def test_verify_against_the_model_covers_every_engine(bundle: Path) -> None:
    report = verify_bundle(bundle, bundle.with_suffix(""))
    assert report
    assert {verdict.engine for verdict in report.engines} == {
        engine.id for engine in nestforge.open_bundle(bundle).manifest.engines
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda exits: exits.update(trims=not exits["trims"]),
        lambda exits: exits["gate"].update(thresholds=[0.9, 0.9]),
        lambda exits: exits.pop("gate"),
    ],
)
def test_exits_that_are_not_the_models_are_caught_under_new_hashes(bundle: Path, tmp_path: Path, change) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "b"))
    edit_manifest(copy, lambda data: change(data["exits"]))
    with pytest.raises(CheckpointError, match="its exits are not those of"):
        verify_bundle(copy, bundle.with_suffix(""))


def test_narrower_submodels_have_segments_and_slices_are_proven(tmp_path: Path) -> None:
    levels = {"depth": (0.75, 1.0), "ffn": (0.5, 1.0), "heads": (0.5, 1.0)}
    path = _compiled(save_tiny(tmp_path / "m"), levels=levels, include="budgets", buckets=[Bucket(4, 8)])
    manifest = nestforge.open_bundle(path).manifest
    assert {engine.emitted for engine in manifest.engines} == {"sliced"}
    narrow = next(entry for entry in manifest.submodels if "ffn24" in entry.id)
    assert [e.segment for e in manifest.engines if e.submodel == narrow.id] == [None, "to1", "to3"]
    assert [proof.subject for proof in manifest.proofs if proof.suite == "slice"] == [narrow.id]


def test_the_same_inputs_give_the_same_bundle(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the deepest submodel, whose engine and segments are all that is traced at a bucket but shorter copies."""

    def compiled(folder: Path) -> dict[str, bytes]:
        shutil.copytree(bundle.with_suffix(""), folder / "m")
        options = {"buckets": [Bucket(4, 8)], "levels": {"depth": (1.0,)}}
        made = compile_bundle(folder / "m", board(budgets={"full": {}}), folder / "b", **options)
        return {path.name: path.read_bytes() for path in made.iterdir() if path.name not in {"build.json", "report.md"}}

    first = compiled(tmp_path / "first")
    monkeypatch.setattr(make_template, "trace", trace)  # not what is known of the first
    assert compiled(tmp_path / "again") == first
    assert len([name for name in first if name.endswith(".onnx")]) == 4


def test_an_engine_says_zero_of_a_saturated_exit(tmp_path: Path) -> None:
    weights = random_weights(shapes_of(CONFIG, SIDECAR))
    scaled = {name: data * (1e5 if name.startswith("exits") else 1) for name, data in weights.items()}
    bundle = _compiled(save_folder(tmp_path / "m", CONFIG, SIDECAR, scaled), include="budgets", buckets=[Bucket(4, 8)])
    with nestforge.load(bundle) as model:
        answer = model({name: array[:1] for name, array in FEEDS.items()}, exits=0.0)
    assert np.diff(np.sort(answer["logits"][0]))[-1] > 1e3
    assert answer["entropy"].tolist() == [0.0]
    assert answer.exits.layer.tolist() == [1], "with <= a saturated row leaves at threshold 0"


@pytest.mark.parametrize("pool", ["mean", "mean_with_padding"])
def test_a_regression_with_text_and_taylor_ranking(tmp_path: Path, pool: str) -> None:
    changes = {"exits.pool": pool, "exits.classes": 1, "gate": None, "embedding": {"mode": "dense"}}
    folder = save_tiny(tmp_path / "m", sidecar=changes)
    shutil.copy(save_tiny_encoder(tmp_path / "bert") / "tokenizer.json", folder)
    bundle = _compiled(folder, text=corpus(tmp_path / "texts.txt"), levels={"depth": (0.5, 1.0), "ffn": (0.5, 1.0)})
    with nestforge.load(bundle) as model:
        assert model.bundle.manifest.exits is None
        assert model.bundle.manifest.ranking.method == "taylor"
        assert {engine.segment for engine in model.bundle.manifest.engines} == {None}
        assert model("the quick brown fox")["logits"].shape == (1, 1)
