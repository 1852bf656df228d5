from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle
from nestforge.compiler.engines import measure as own
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.engines.measure import fit_rungs, measure_engines, measure_quality
from nestforge.compiler.examples.corpus import ArrayCorpus, Corpus
from nestforge.compiler.planning.cost_model import predict
from nestforge.compiler.planning.levels import ladder, levels
from nestforge.compiler.planning.plan import make_plan
from nestforge.compiler.work.clock import Clock
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.probe_host import _fingerprint, probe_host
from nestforge.progress import silent
from nestforge.runtime.consistency.measure import measure
from nestforge.runtime.consistency.samples import ArraySamples
from nestforge.runtime.consistency.tallies import cosines, recalls_at
from nestforge.runtime.engines import measure as module
from nestforge.runtime.engines.measure import measured_shapes
from support.tiny_compile import BUCKET, board, builder_in, template_of
from support.tokenizer_files import WORDS


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines in the order of their rounds; each round takes a little longer than the one before."""
    engines: list[str] = []

    def fake(call: Any, **_: Any) -> list[float]:
        runner = call.func.__self__
        assert runner.residency == "packed"
        call()
        engines.append(runner.engine.submodel)
        return [3.0 + len(engines) / 100] * 10

    monkeypatch.setattr(module, "times_of", fake)
    return engines


def on_this_host(builder: EngineBuilder) -> EngineBuilder:
    """One of whose budgets limits latency, so that rungs all over the ladder are measured."""
    budgets = {"full": BudgetSpec(), "fast": BudgetSpec(latency_ms="50 %")}
    return replace(builder, profile=replace(builder.profile, budgets=budgets, host=_fingerprint(probe_host())))


def steps(builder: EngineBuilder) -> Any:
    return levels(builder.universal.spec, None, 8)


def rungs(builder: EngineBuilder) -> Any:
    return ladder(steps(builder))


def test_another_device_is_predicted_and_never_measured(builder: EngineBuilder, measured: list[str]) -> None:
    assert fit_rungs(builder, rungs(builder), (), Clock(silent)) == {}
    engines = [builder.build(builder.universal.spec.universal(), BUCKET)]
    plan = make_plan(builder.universal.source, builder.profile, levels=steps(builder))
    (latency,) = measure_engines(builder, engines, {}, Clock(silent))
    assert latency.largest.predicted_ms == plan.candidates[-1].costs[0].predicted_ms
    assert (latency.is_measured, latency.residency) == (False, None)
    assert measured == []


def test_a_profile_of_a_host_like_this_one_is_another_device(builder: EngineBuilder, measured: list[str]) -> None:
    other = replace(builder, profile=replace(builder.profile, host="0123456789abcdef"))
    assert fit_rungs(other, rungs(builder), (), Clock(silent)) == {}
    assert measured == []


def test_rungs_spread_over_the_ladder_are_measured_in_turn(builder: EngineBuilder, measured: list[str]) -> None:
    here = on_this_host(builder)
    corrections = fit_rungs(here, rungs(builder), (), Clock(silent))
    ids = [rung.id for rung in rungs(builder)]
    assert len(ids) == 7, "3 steps between levels, 2 layers each, and the universal model"
    picked = [ids[0], ids[2], ids[4], ids[6]]
    assert measured == picked * 3
    assert set(corrections) == {(BUCKET, "fp32")}
    assert corrections[BUCKET, "fp32"].rungs == 4


def test_where_no_budget_limits_latency_only_what_is_included_is_measured(
    builder: EngineBuilder, measured: list[str]
) -> None:
    here = on_this_host(builder)
    here = replace(
        here, profile=replace(here.profile, budgets={"full": BudgetSpec(), "half": BudgetSpec(flops="50 %")})
    )
    ids = [rung.id for rung in rungs(builder)]
    corrections = fit_rungs(here, rungs(builder), {ids[0], ids[-1], "ffn12_20-heads1_2"}, Clock(silent))
    assert measured == [ids[0], ids[-1]] * 3
    assert corrections[BUCKET, "fp32"].rungs == 2
    assert sorted(path.name for path in here.stage.folder.glob("*.onnx")) == [
        "ffn32-heads2.b2-s8.onnx",
        "ffn8-heads1.b2-s8.onnx",
    ]


def test_the_correction_brings_predictions_to_what_was_measured(
    builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host that is three times slower than its profile says, every prediction is corrected by three."""
    here = on_this_host(builder)
    source = here.universal.source

    def slow(call: Any, **_: Any) -> list[float]:
        cost = predict(source.workload(source.spec.parse(call.func.__self__.engine.submodel), BUCKET), here.profile)
        return [3 * cost.predicted_ms]

    monkeypatch.setattr(module, "times_of", slow)
    correction = fit_rungs(here, rungs(builder), (), Clock(silent))[BUCKET, "fp32"]
    cost = predict(source.workload(source.spec.parse("ffn12_20-heads1_2"), BUCKET), here.profile)
    assert correction.corrected_ms(cost) == pytest.approx(3 * cost.predicted_ms, rel=1e-6)


def test_an_interrupted_compile_does_not_measure_again(builder: EngineBuilder, measured: list[str]) -> None:
    """It would cost time, and other figures would choose another plan than the one half built."""
    here = on_this_host(builder)
    corrections = fit_rungs(here, rungs(builder), (), Clock(silent))
    engines = [here.build(here.universal.spec.parse(name), BUCKET) for name in ("ffn8-heads1", "ffn32-heads2")]
    latencies = measure_engines(here, engines, corrections, Clock(silent))
    count = len(measured)
    for path in here.stage.folder.glob("*.onnx"):
        path.unlink()  # as the manifest's stage does with rungs that were only measured
    assert fit_rungs(here, rungs(builder), (), Clock(silent)) == corrections
    assert measure_engines(here, engines, corrections, Clock(silent)) == latencies
    assert len(measured) == count


def test_predicted_and_measured_stand_side_by_side(builder: EngineBuilder, measured: list[str]) -> None:
    here = on_this_host(builder)
    corrections = fit_rungs(here, rungs(builder), (), Clock(silent))
    unlimited = replace(here.profile, budgets={"full": BudgetSpec()})
    plan = make_plan(here.universal.source, unlimited, levels=steps(builder), corrections=corrections)
    engine = here.build(here.universal.spec.parse("ffn8-heads1"), BUCKET)
    (latency,) = measure_engines(here, [engine], corrections, Clock(silent))
    assert latency.engine == engine.id
    assert latency.largest.predicted_ms == plan.candidates[0].costs[0].corrected_ms
    (point,) = latency.points
    assert (point.measured_p50_ms, point.measured_p95_ms, latency.residency) == (3.01, 3.01, "packed")
    assert point.noise.runs == 30
    assert point.noise.repeat_ratio == pytest.approx(3.05 / 3.01)


def test_a_rung_that_is_chosen_is_not_timed_again(builder: EngineBuilder, measured: list[str]) -> None:
    here = on_this_host(builder)
    corrections = fit_rungs(here, rungs(builder), (), Clock(silent))
    rung, *_, universal = rungs(builder)
    between = rungs(builder)[1]
    first = len(measured)
    engines = [here.build(submodel, BUCKET) for submodel in (rung, between, universal)]
    latencies = measure_engines(here, engines, corrections, Clock(silent))
    assert measured[first:] == [between.id] * 3
    medians = [latency.largest.measured_p50_ms for latency in latencies]
    assert medians == [3.01, 3.13, 3.04], "rungs have the figures of the four that were timed in turn"


@pytest.mark.parametrize("is_included", [True, False])
def test_of_a_range_a_rung_is_timed_at_every_size_once(
    tiniest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_included: bool
) -> None:
    """Where it is built in any case at once, so that its figures are of the same minutes."""
    bucket = Bucket.parse("1..2x2..32")
    timed: list[Bucket] = []

    def fake(call: Any, **_: Any) -> list[float]:
        timed.append(Bucket(*call.args[0]["input_ids"].shape))
        return [float(timed[-1].tokens)]

    monkeypatch.setattr(module, "times_of", fake)
    universal = load_universal(open_source(tiniest))
    template, profile = template_of(universal, bucket), board(buckets=[bucket.label])
    here = on_this_host(builder_in(tmp_path / "stage", universal, template, profile))
    whole = universal.spec.universal()
    corrections = fit_rungs(here, [whole], {whole.id} if is_included else (), Clock(silent))
    assert corrections[bucket, "fp32"].rungs == 3, "at 1x16, 1x32 and 2x16"
    every, fitted = measured_shapes(bucket), [Bucket(1, 16), Bucket(1, 32), Bucket(2, 16)]
    assert timed == (every if is_included else fitted) * 3
    timed.clear()
    (latency,) = measure_engines(here, [here.build(whole, bucket)], corrections, Clock(silent))
    assert timed == ([] if is_included else [shape for shape in every if shape not in fitted] * 3)
    assert [(point.batch, point.sequence) for point in latency.points] == [(one.batch, one.sequence) for one in every]
    assert [point.measured_p50_ms for point in latency.points] == [one.tokens for one in every]


TEXTS = tuple(f"{a} {b} {c}" for a, b, c in zip(WORDS, WORDS[3:], WORDS[5:], strict=False))
CORPUS = Corpus(("the fox",), TEXTS)


def _engines(builder: EngineBuilder, *ids: str) -> list[EngineEntry]:
    return [builder.build(builder.universal.spec.parse(name), BUCKET) for name in ids]


def test_without_texts_nothing_is_claimed(builder: EngineBuilder) -> None:
    engines = _engines(builder, "ffn32-heads2")
    assert measure_quality(builder, engines, None, Clock(silent)) == {}


def test_quality_equals_what_pytorch_says(builder: EngineBuilder) -> None:
    """Independent of engines, buckets and padding: one text at a time through the narrowed modules."""
    encoder = builder.universal.source.encoder
    engines = _engines(builder, "ffn8-heads1", "ffn32-heads2")
    quality = measure_quality(builder, engines, CORPUS, Clock(silent))

    def embeddings(submodel_id: str) -> np.ndarray:
        narrowed = builder.universal.narrow(builder.universal.spec.parse(submodel_id))
        feeds = [encoder.encode([text], BUCKET.sequence, truncate=True).feeds.values() for text in TEXTS]
        return np.concatenate([narrowed(*map(torch.from_numpy, values))[-1].numpy() for values in feeds])

    universal, small = embeddings("ffn32-heads2"), embeddings("ffn8-heads1")
    figures = quality["ffn8-heads1"].figures
    assert figures["mean_cosine"] == pytest.approx(cosines(universal, small).mean(), abs=1e-5)
    assert figures["recall_at_10"] == pytest.approx(recalls_at(universal, small, 10).mean())
    assert figures["mean_cosine"] < 0.999
    whole = quality["ffn32-heads2"]
    assert (whole.samples, whole.positions) == (len(TEXTS), None)
    assert whole.figures == {"mean_cosine": pytest.approx(1.0), "recall_at_10": 1.0}


def test_a_model_without_embedding_is_averaged_over_real_tokens(builder: EngineBuilder) -> None:
    text = replace(builder.bundle.manifest.text, embedding=None)
    plain = replace(builder, bundle=replace(builder.bundle, manifest=replace(builder.bundle.manifest, text=text)))
    encoder = builder.universal.source.encoder
    quality = measure_quality(plain, _engines(plain, "ffn8-heads1"), CORPUS, Clock(silent))["ffn8-heads1"]

    def embeddings(submodel_id: str) -> np.ndarray:
        """Texts that are not padded, so that every position is a real token."""
        narrowed = builder.universal.narrow(builder.universal.spec.parse(submodel_id))
        feeds = [encoder.encode([text_], BUCKET.sequence).feeds.values() for text_ in TEXTS]
        return np.stack([narrowed(*map(torch.from_numpy, values))[0][0].mean(0).numpy() for values in feeds])

    expected = cosines(embeddings("ffn32-heads2"), embeddings("ffn8-heads1")).mean()
    assert quality.figures["mean_cosine"] == pytest.approx(expected, abs=1e-5)


def test_what_was_measured_is_not_measured_again(builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = _engines(builder, "ffn8-heads1", "ffn32-heads2")
    first = measure_quality(builder, engines, CORPUS, Clock(silent))
    measured: list[str] = []

    def spy(bundle: Bundle, universal: EngineEntry, engines: list[EngineEntry], *rest: Any) -> Any:
        measured.extend(engine.submodel for engine in engines)
        return measure(bundle, universal, engines, *rest)

    monkeypatch.setattr(own, "measure", spy)
    assert measure_quality(builder, engines, CORPUS, Clock(silent)) == first
    assert measured == []
    (builder.stage.work / f"quality-{engines[0].file}.json").unlink()
    again = measure_quality(builder, engines, CORPUS, Clock(silent))
    assert (again, list(again), measured) == (first, list(first), ["ffn8-heads1"])


def test_another_corpus_has_another_hash(builder: EngineBuilder, tmp_path: Path) -> None:
    engines = _engines(builder, "ffn8-heads1")
    one = measure_quality(builder, engines, CORPUS, Clock(silent))["ffn8-heads1"]
    (builder.stage.work / f"quality-{engines[0].file}.json").unlink()
    other = measure_quality(builder, engines, replace(CORPUS, held_out=TEXTS[1:]), Clock(silent))
    assert other["ffn8-heads1"].data_sha256 != one.data_sha256
    assert other["ffn8-heads1"].samples == one.samples - 1


def test_rows_of_arrays_need_no_tokenizer(builder: EngineBuilder) -> None:
    encoder, engines = builder.universal.source.encoder, _engines(builder, "ffn8-heads1")
    rows = ArraySamples(encoder.encode(TEXTS, BUCKET.sequence).feeds)
    by_text = measure_quality(builder, engines, CORPUS, Clock(silent))["ffn8-heads1"]
    (builder.stage.work / f"quality-{engines[0].file}.json").unlink()
    by_rows = measure_quality(builder, engines, ArrayCorpus(rows, rows), Clock(silent))["ffn8-heads1"]
    assert by_rows.figures == {name: pytest.approx(value) for name, value in by_text.figures.items()}
    assert by_rows.data_sha256 == rows.sha256
