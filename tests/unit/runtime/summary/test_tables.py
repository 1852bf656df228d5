from __future__ import annotations

from dataclasses import replace

from nestforge.bundle.build_record import BuildRecord, Latency, LatencyPoint, Noise
from nestforge.bundle.manifest import Manifest, Quality
from nestforge.elastic import Axis
from nestforge.runtime.summary.tables import (
    bundle_facts,
    describe_axes,
    engine_table,
    latency_warnings,
    stage_table,
    submodel_table,
)

RECORD = BuildRecord(1, "0" * 64, "2026-11-21T00:00:00Z", (), {}, {}, {}, ())


def test_an_engine_says_why_it_was_traced(manifest: Manifest) -> None:
    first, second, third, *_ = manifest.engines
    problem = "node 17 (CumSum): no rule says how axis layers.3.ffn passes through it"
    engines = (
        first,
        replace(second, emitted="traced", slice_problem="no rule for CumSum"),
        replace(third, emitted="traced", slice_problem=problem),
    )
    table = engine_table(replace(manifest, engines=engines), RECORD)
    column = [row[table.columns.index("emitted")] for row in table.rows]
    assert column == [
        "sliced",
        "traced: no rule for CumSum",
        "traced: node 17 (CumSum): no rule says how axis...",
    ]


def test_axes_are_counted_by_kind_and_size() -> None:
    assert describe_axes([Axis("layers.0.ffn", 8), Axis("layers.1.ffn", 8), Axis("sequence", 16)]) == (
        "2 x ffn 8, 1 x sequence 16 tokens"
    )
    assert describe_axes([Axis("moe.capacity_factor", 100, (50, 100)), Axis("moe.experts", 4)]) == (
        "1 x moe.capacity_factor 100 %, 1 x moe.experts 4"
    )
    assert describe_axes([]) == "none"


def test_noisy_figures_are_marked_and_warned_of(manifest: Manifest) -> None:
    quiet, noisy = Noise(20, 0.05, 1.02, 0.0), Noise(20, 0.05, 1.3, 0.0)
    first, second, third, fourth = (engine.id for engine in manifest.engines)
    points = (LatencyPoint(1, 4, 1.0, 2.0, None, noisy), LatencyPoint(1, 8, 1.0, 3.0, None, quiet))
    latencies = (
        Latency(first, 1.0, 2.0, noise=quiet),
        Latency(second, 1.0, 2.0, noise=noisy),
        Latency(third, 1.0, 3.0, points=points, noise=quiet),
        Latency(fourth, 1.0),
    )
    record = replace(RECORD, latencies=latencies)
    table = engine_table(manifest, record)
    assert [row[table.columns.index("measured ms")] for row in table.rows] == ["2.00", "2.00 noisy", "3.00", "-"]
    warning = (
        f"2 of 4 measured latencies, in 2 of 3 engines, are noisy ({second}: measured twice it differs by 30% (at most "
        "10%)); in a calm moment `nestforge measure BUNDLE` measures again"
    )
    assert latency_warnings(latencies) == [warning]
    assert ("warning", warning) in bundle_facts(manifest, record)
    assert latency_warnings(latencies[:1]) == []


def with_figures(manifest: Manifest, *figures: dict[str, float] | None) -> Manifest:
    entries = zip(manifest.submodels, figures, strict=True)
    submodels = tuple(replace(e, quality=Quality(9, f, "0" * 64) if f is not None else None) for e, f in entries)
    return replace(manifest, submodels=submodels)


def test_submodels_show_the_figures_that_the_model_has(manifest: Manifest) -> None:
    table = submodel_table(with_figures(manifest, None, {"loss": 2.5, "token_agreement": 0.75, "new_one": 1.5}), RECORD)
    assert table.columns[-4:] == ["token agreement", "loss nats/token", "new_one", "budgets"]
    assert [row[-4:-1] for row in table.rows] == [["-", "-", "-"], ["0.7500", "2.5000", "1.5"]]
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_without_figures_there_are_no_columns_for_them(manifest: Manifest) -> None:
    columns = submodel_table(manifest, RECORD).columns
    assert [column.rpartition(" at ")[0] or column for column in columns[-3:]] == [
        "predicted ms",
        "measured ms",
        "budgets",
    ]


def test_stages_with_what_they_took_on_the_wall_and_of_the_processor() -> None:
    record = replace(RECORD, seconds={"load": 1.26, "trace": 10.0}, cpu_seconds={"load": 2.0, "trace": 12.34})
    table = stage_table(record)
    assert table.columns == ["stage", "seconds", "CPU seconds"]
    assert table.rows == [["load", "1.3", "2.0"], ["trace", "10.0", "12.3"], ["all", "11.3", "14.3"]]
    assert stage_table(replace(record, cpu_seconds={})).rows == [["load", "1.3", "-"], ["trace", "10.0", "-"]]
