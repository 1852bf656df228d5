"""Engines of a range, from the checkpoint to the answer: any size, nothing padded, as PyTorch computes it."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import Segment
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler import verify
from nestforge.compiler.engines import whole
from nestforge.errors import ExportError, PlanError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.runtime.engines.onnxruntime_gpu.provider import PROVIDERS
from nestforge.runtime.engines.runner import runnable_engines
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.runtime.model import ElasticModel
from nestforge.runtime.request import Request
from nestforge.runtime.summary import submodel_table
from support.gated_decoders import save_decoder
from support.tiny_compile import board, save_tiniest
from support.tiny_matlm import save_tiny_matlm
from support.tiny_mixer import save_tiny_mixer
from support.tiny_models import save_tiny_matvit, save_tiny_vit

FULL = {"budgets": {"full": {}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiniest(tmp_path_factory.mktemp("range") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[ElasticModel]:
    """One range, and a static bucket that overlaps it."""
    profile = board(**FULL, buckets=["1..4x1..16", "2x8"])
    with nestforge.load(nestforge.compile(folder, profile, folder.parent / "bundle", include="budgets")) as opened:
        yield opened


@pytest.fixture(scope="module")
def universal(folder: Path) -> UniversalModel:
    return load_universal(open_source(folder))


@pytest.mark.parametrize("shape", [Bucket(1, 1), Bucket(1, 16), Bucket(3, 5), Bucket(4, 16)], ids=str)
def test_any_size_is_answered_as_pytorch_does_without_padding(
    model: ElasticModel, universal: UniversalModel, shape: Bucket
) -> None:
    feeds = random_feeds(model.bundle.manifest.inputs, shape, seed=shape.tokens)
    answer = model(feeds)
    assert (answer.bucket, answer.padding) == (Bucket(4, 16, 1, 1), None)
    with torch.no_grad():
        expected = universal.module(*map(torch.from_numpy, feeds.values()))
    for spec, tensor in zip(model.bundle.manifest.outputs, expected, strict=True):
        np.testing.assert_allclose(answer.outputs[spec.name], tensor.numpy(), atol=2e-6)


def test_a_row_does_not_depend_on_the_size_it_came_in(model: ElasticModel) -> None:
    feeds = random_feeds(model.bundle.manifest.inputs, Bucket(4, 16), seed=9)
    feeds["attention_mask"][:] = np.arange(16) < np.array([[3], [16], [7], [1]])
    together = model(feeds)
    for row, length in enumerate((3, 16, 7, 1)):
        alone = model({name: np.ascontiguousarray(array[row : row + 1, :length]) for name, array in feeds.items()})
        hidden = together.outputs["last_hidden_state"][row : row + 1, :length]
        np.testing.assert_allclose(alone.outputs["last_hidden_state"], hidden, atol=2e-6)


def test_a_limit_that_the_range_breaks_is_kept_by_a_bucket_that_pads(model: ElasticModel) -> None:
    """Memory counts at the largest shape of a range, 4x16 here."""
    submodel = max(model.bundle.manifest.submodels, key=lambda entry: entry.parameters)
    static, free = (
        (submodel.weight_bytes + engine.private_bytes + engine.activation_bytes) / 1e6
        for engine in sorted(
            (one for one in model.bundle.manifest.engines if one.submodel == submodel.id),
            key=lambda one: not one.bucket.is_static,
        )
    )
    assert static < free
    limited = model.choose(2, 7, memory_mb=(static + free) / 2)
    assert (limited.engine.submodel, limited.engine.bucket) == (submodel.id, Bucket(2, 8))


def test_a_text_is_cut_to_what_a_limit_affords_at_its_own_length(model: ElasticModel) -> None:
    affordable = model.choose(1, 11).latency_ms
    longest = model._dispatcher.longest_sequence(1, Request(latency_ms=affordable))
    assert 11 <= longest <= 16
    assert model.choose(1, longest, latency_ms=affordable).latency_ms <= affordable


def test_parity_was_proven_all_over_the_range(model: ElasticModel) -> None:
    engine = next(one for one in model.bundle.manifest.engines if not one.bucket.is_static)
    places = [case.partition(" at ")[2] for case in engine.parity.cases]
    assert {"1x1", "1x16", "4x1", "4x16"} <= set(places)
    assert len(places) >= 8


def test_what_was_written_is_checked_on_few_cases_and_by_verify_on_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[list[str]] = []
    judge = whole.judge_engine

    def counted(manifest: Any, universal: Any, engine: Any, cases: Any, *rest: Any) -> Any:
        judged.append([case.name for case in cases])
        return judge(manifest, universal, engine, cases, *rest)

    monkeypatch.setattr(whole, "judge_engine", counted)
    profile = board(**FULL, buckets=["1..4x1..16"])
    out = nestforge.compile(folder, profile=profile, output=tmp_path / "bundle", include="budgets")
    (engine,) = open_bundle(out).manifest.engines
    (few,) = judged
    assert len(few) == 9 < len(engine.parity.cases)
    assert {"1x1", "4x16"} <= {name.rpartition(" ")[2] for name in few}
    judged.clear()
    assert verify.verify_bundle(out, folder)
    assert judged == [list(engine.parity.cases)] * 2, "as the user's files have it, and in the bundle's order"


FAMILIES = {
    "matlm": (save_tiny_matlm, "1..3x1..8"),
    "decoder": (save_decoder, "1..3x1..8"),
    "vit": (save_tiny_vit, "1..3x1"),
    "matvit": (save_tiny_matvit, "1..3x1"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_can_is_sliced_from_one_trace(family: str, tmp_path: Path) -> None:
    save, bucket = FAMILIES[family]
    save(tmp_path / "model")
    profile = board(**FULL, buckets=[bucket])
    out = nestforge.compile(tmp_path / "model", profile=profile, output=tmp_path / "bundle", levels={"ffn": (0.5, 1.0)})
    with nestforge.load(out) as opened:
        assert len(opened.bundle.manifest.engines) == 2
        assert {engine.emitted for engine in opened.bundle.manifest.engines} == {"sliced"}
        for batch in (1, 3):
            feeds = random_feeds(opened.bundle.manifest.inputs, Bucket(batch, 5))
            assert opened(feeds).padding is None


@pytest.mark.parametrize("precision", ["fp16", "int8-dynamic", "int4"])
def test_other_precisions_have_ranges_too(folder: Path, tmp_path: Path, precision: str) -> None:
    profile = board(**FULL, precision=[precision], buckets=["1..2x1..8"])
    out = nestforge.compile(folder, profile=profile, output=tmp_path / "bundle", include="budgets")
    with nestforge.load(out) as opened:
        assert opened(random_feeds(opened.bundle.manifest.inputs, Bucket(1, 3))).padding is None


def test_a_model_that_cannot_says_why_and_gets_buckets(tmp_path: Path) -> None:
    reason = "experts have slots for the tokens of one bucket"
    save_tiny_mixer(tmp_path / "model")
    plan = nestforge.plan(tmp_path / "model", profile=board(**FULL, buckets=["1..4x1..16"]))
    assert [cost.bucket for cost in plan.candidates[0].costs] == [Bucket(1, 16), Bucket(4, 16)]
    assert any(note.startswith("static buckets 1x16") and reason in note for note in plan.notes)
    asked = nestforge.plan(tmp_path / "model", profile=board(**FULL, buckets=["1..4x1..16"]), buckets=[Bucket(1, 16)])
    assert not any("static buckets" in note for note in asked.notes)
    with pytest.raises(ExportError, match=rf"^bucket 1..4x1..16: {reason}.*; ask for static buckets"):
        nestforge.plan(tmp_path / "model", profile=board(**FULL), buckets=[Bucket(4, 16, 1, 1)])


def test_a_gpu_provider_runs_engines_of_ranges_too(model: ElasticModel) -> None:
    engines = model.bundle.manifest.engines
    assert runnable_engines(model.bundle, PROVIDERS["cuda"]) == engines
    # on memory that is bound to one shape
    segment = replace(engines[0], bucket=Bucket(4, 16, 1, 1), kind=Segment(part="s1"))
    bundle = replace(model.bundle, manifest=replace(model.bundle.manifest, engines=(*engines, segment)))
    assert runnable_engines(bundle, PROVIDERS["cuda"]) == engines


def test_budgets_are_judged_at_a_shape_that_is_stated(folder: Path) -> None:
    profile = board(**FULL, buckets=["1..4x1..16"])
    assert nestforge.plan(folder, profile=profile).budget_bucket == Bucket(1, 16)
    plan = nestforge.plan(folder, profile=replace(profile, budget_at=Bucket(2, 5)))
    assert plan.budget_bucket == Bucket(2, 5)
    assert not any("budgets limit" in note for note in plan.notes)
    beyond = nestforge.plan(folder, profile=replace(profile, budget_at=Bucket(1, 128)))
    assert beyond.budget_bucket == Bucket(1, 16)
    assert beyond.notes[0] == "budgets limit latency and FLOPs at 1x16, the nearest to 1x128 that engines run at"


def test_budgets_may_be_asked_for_at_a_shape(folder: Path) -> None:
    profile = replace(board(**FULL, buckets=["1..4x1..16"]), budget_at=Bucket(1, 16))
    assert nestforge.plan(folder, profile=profile, budget_at=Bucket(3, 7)).budget_bucket == Bucket(3, 7)
    other = nestforge.plan(folder, profile=profile, buckets=[Bucket(2, 8)])
    assert other.budget_bucket == Bucket(2, 8), "the profile's shape is that of its own buckets"
    assert not any("budgets limit" in note for note in other.notes)
    for shape, message in (
        (Bucket(4, 8, 1), "`budget_at=1..4x8`: expected one shape, such as 4x8"),
        (
            Bucket(5, 8),
            "`budget_at=5x8`: larger than every bucket (1..4x1..16); ask for a smaller shape, or for a bucket",
        ),
    ):
        with pytest.raises(PlanError, match=re.escape(message)):
            nestforge.plan(folder, profile=profile, budget_at=shape)


def test_the_table_of_submodels_is_that_of_the_shape_of_budgets(model: ElasticModel) -> None:
    manifest, build = model.bundle.manifest, model.bundle.build
    at = {**manifest.provenance.profile, "budget_at": "1x8"}
    stated = replace(manifest, provenance=replace(manifest.provenance, profile=at))
    table = submodel_table(stated, build)
    assert table.columns[3:5] == ["predicted ms at 1x8", "measured ms at 1x8"]
    (points,) = (one.points for one in build.latencies if one.engine == f"{manifest.submodels[-1].id}@b1_4-s1_16")
    (known,) = (point for point in points if (point.batch, point.sequence) == (1, 8))
    assert table.rows[-1][3] == f"{known.predicted_ms:.2f}"
