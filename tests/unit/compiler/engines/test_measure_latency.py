from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.engines.measure_latency import fit_rungs, measure_engines
from nestforge.compiler.planning.cost_model import predict
from nestforge.compiler.planning.ladder import ladder
from nestforge.compiler.planning.levels import levels
from nestforge.compiler.planning.plan import make_plan
from nestforge.compiler.work.clock import Clock, silent
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.probe_host import _fingerprint, probe_host
from nestforge.runtime.engines import measure as module
from nestforge.runtime.engines.measure import measured_shapes
from support.tiny_compile import BUCKET, board, builder_in, template_of


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
    assert latency.predicted_ms == plan.candidates[-1].costs[0].predicted_ms
    assert (latency.measured_p50_ms, latency.measured_p95_ms, latency.residency) == (None, None, None)
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
    assert latency.predicted_ms == plan.candidates[0].costs[0].corrected_ms
    assert (latency.measured_p50_ms, latency.measured_p95_ms, latency.residency) == (3.01, 3.01, "packed")
    assert latency.noise is not None
    assert latency.noise.runs == 30
    assert latency.noise.repeat_ratio == pytest.approx(3.05 / 3.01)


def test_a_rung_that_is_chosen_is_not_timed_again(builder: EngineBuilder, measured: list[str]) -> None:
    here = on_this_host(builder)
    corrections = fit_rungs(here, rungs(builder), (), Clock(silent))
    rung, *_, universal = rungs(builder)
    between = rungs(builder)[1]
    first = len(measured)
    engines = [here.build(submodel, BUCKET) for submodel in (rung, between, universal)]
    latencies = measure_engines(here, engines, corrections, Clock(silent))
    assert measured[first:] == [between.id] * 3
    medians = [latency.measured_p50_ms for latency in latencies]
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
    assert latency.points is not None
    assert [(point.batch, point.sequence) for point in latency.points] == [(one.batch, one.sequence) for one in every]
    assert [point.measured_p50_ms for point in latency.points] == [one.tokens for one in every]
