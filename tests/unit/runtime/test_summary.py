"""Summaries and descriptions of bundles."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.bundle.build_record import BuildRecord, LatencyPoint, Noise
from nestforge.bundle.entries.engine_entry import EngineEntry, ParityRouting, RoutingEntry, Whole
from nestforge.bundle.entries.generation_entry import CachedLayer
from nestforge.bundle.manifest import Manifest, Quality
from nestforge.bundle.open_bundle import open_bundle
from nestforge.elastic import Axis
from nestforge.runtime.description import described
from nestforge.runtime.generation.cache import Cache
from nestforge.runtime.summary import (
    CacheSize,
    ShortNames,
    bundle_facts,
    cache_facts,
    cache_sizes,
    common_details,
    describe_axes,
    detail_tables,
    engine_table,
    latency_warnings,
    sizes_of,
    stage_table,
    submodel_table,
)
from nestforge.tables import Table
from support.latencies import latency

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
        latency(first, 1.0, 2.0, noise=quiet),
        latency(second, 1.0, 2.0, noise=noisy),
        latency(third, points=points),
        latency(fourth, 1.0),
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


NAMES = ShortNames({"ffn16": "S", "ffn16x1_32x1": "S+1", "ffn32": "XL", "ffn32.int8": "XL.int8"})


def test_whole_ids_become_labels_also_in_those_of_engines_and_in_sentences() -> None:
    assert NAMES("ffn16x1_32x1@b1-s8") == "S+1@b1-s8"
    assert NAMES("ffn32.int8.layers0_3@b1-s8") == "XL.int8.layers0_3@b1-s8"
    assert NAMES("in the next, ffn32, latency exceeds") == "in the next, XL, latency exceeds"
    assert NAMES("ffn16-heads2 and ffn168 are others") == "ffn16-heads2 and ffn168 are others"


def test_a_table_says_which_label_is_which_id(manifest: Manifest) -> None:
    assert ShortNames.of(manifest).ids == Table(["submodel", "id"], [["S", "ffn16"], ["XL", "ffn32"]])
    assert ShortNames({})("ffn16") == "ffn16"


def deciding(engine: EngineEntry, capacity: int, form: str) -> EngineEntry:
    assert engine.parity is not None
    judged = (
        ParityRouting("routes.1", 32, 0, 0.0, {"tokens_dropped": 0.25, "slots_used": 1.0}),
        ParityRouting("routes.2", 32, 3, 1.5e-6, {"tokens_dropped": 0.5}),
    )
    return replace(
        engine,
        kind=Whole(
            routing=tuple(RoutingEntry(one.name, (1, 4, capacity)) for one in judged),
            metadata={"router": "experts_choose", "capacity": capacity},
            variants={"moe.combine": form},
        ),
        parity=replace(engine.parity, routing=judged),
    )


def test_most_engines_have_no_details(manifest: Manifest) -> None:
    assert detail_tables(manifest) == {}
    assert common_details(manifest) == {}


def test_what_differs_is_a_column_and_what_does_not_a_fact(manifest: Manifest) -> None:
    engines = tuple(
        deciding(engine, capacity, "gather") for engine, capacity in zip(manifest.engines, (8, 8, 4, 4), strict=True)
    )
    shown = replace(manifest, engines=engines)
    assert common_details(shown) == {"router": "experts_choose", "moe.combine": "gather"}
    metadata, routing = detail_tables(shown).values()
    assert list(detail_tables(shown)) == ["Metadata and variants", "Routing"]
    assert metadata.columns == ["engine", "capacity (slots)"]
    assert metadata.rows[1:3] == [["S@b2-s16", "8"], ["XL@b1-s8", "4"]]
    assert routing.columns[1:] == [
        "routes",
        "choices",
        "not PyTorch's own",
        "worst score gap",
        "tokens dropped %",
        "slots used %",
    ]
    assert routing.rows[:2] == [
        ["S@b1-s8", "routes.1", "32", "0", "0.0e+00", "25.00", "100.00"],
        ["S@b1-s8", "routes.2", "32", "3", "1.5e-06", "50.00", "-"],
    ]
    assert len(routing.rows) == 8


def test_an_engine_may_lack_what_others_have(manifest: Manifest) -> None:
    first, *others = manifest.engines
    shown = replace(manifest, engines=(deciding(first, 8, "one_hot"), *others))
    assert common_details(shown) == {}
    metadata = detail_tables(shown)["Metadata and variants"]
    assert metadata.columns == ["engine", "router", "capacity (slots)", "moe.combine"]
    assert metadata.rows == [["S@b1-s8", "experts_choose", "8", "one_hot"]]


GOLDEN = Path(__file__).parents[2] / "golden"
LAYERS = (CachedLayer(4, 64, window=512), CachedLayer(4, 64))


def test_behind_a_window_the_capacity_takes_nothing() -> None:
    token = 4 * 2 * 4 * 64
    sizes = cache_sizes(LAYERS, 8192, longest_run=512)
    assert sizes == (CacheSize(2048, token * (1024 + 2048)), CacheSize(8192, token * (1024 + 8192)))
    assert cache_facts(sizes) == [("cache of a row", "6.3 MB of 2048 tokens, 18.9 MB of 8192 tokens")]
    assert sizes[0].bytes == Cache.empty(LAYERS, 1, 2048, longest_run=512).bytes


def test_a_bundle_states_what_its_caches_take() -> None:
    bundle = open_bundle(GOLDEN / "bundle-windows")
    assert sizes_of(bundle.manifest.generation) == (CacheSize(560, 4 * 2 * 2 * 8 * (560 + 520)),)
    assert dict(bundle_facts(bundle.manifest, bundle.build))["cache of a row"] == "0.1 MB of 560 tokens"
    silent = open_bundle(GOLDEN / "bundle-ranges")
    assert "cache of a row" not in dict(bundle_facts(silent.manifest, silent.build))


def test_caches_of_one_size_are_stated_by_it() -> None:
    token = 4 * 2 * 4 * 8
    generation = open_bundle(GOLDEN / "bundle-tensorrt").manifest.generation
    assert sizes_of(generation) == (CacheSize(24, 24 * token), CacheSize(48, 48 * token))


def test_a_loaded_model_describes_itself(tiny_bundle: Path) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        assert [(one.id, one.labels, one.precision) for one in model.submodels] == [
            ("ffn32", ("XL",), "fp32"),
            ("ffn16", ("S",), "fp32"),
        ]
        largest = model.submodels[0]
        assert (largest.parameters, largest.weight_mb, dict(largest.figures)) == (1328, 1328 * 4 / 1e6, {})
        assert [(one.name, one.submodel, one.limits.latency_ms) for one in model.budgets] == [("edge", "ffn16", 1.0)]
        assert [(one.name, one.dtype, one.dims) for one in model.inputs] == [
            ("input_ids", "int64", ("batch", "sequence")),
            ("attention_mask", "int64", ("batch", "sequence")),
        ]
        assert [one.name for one in model.outputs] == ["hidden", "total"]
        assert model.precisions == ("fp32",)
        shown = model._repr_html_()
    for text in ("ElasticModel(", "hidden float32 [batch, sequence, 16]", "budget edge", "<td>ffn16</td>"):
        assert text in shown


def test_only_what_may_run_here_is_described(manifest: Manifest) -> None:
    assert [one.id for one in described(manifest, {"ffn16@b1-s8"})] == ["ffn16"]
    assert described(manifest, ()) == ()


@pytest.mark.parametrize("rows", [1, 5])
def test_an_answer_in_a_notebook(own_bundle: Path, feeds: Callable[..., Any], edit_manifest: Any, rows: int) -> None:
    edit_manifest(own_bundle, lambda data: data["budgets"][0].update(reason="<b>fast</b>"))
    with nestforge.load(own_bundle, threads=1) as model:
        shown = model(feeds(rows, 8), budget="edge")._repr_html_()
        assert "<b>" not in model._repr_html_()
    assert "Answer of ffn16" in shown
    assert "budget edge: &lt;b&gt;fast&lt;/b&gt;" in shown
    assert f"<tr><td>total</td><td>float32</td><td>{rows}x16</td></tr>" in shown
    assert ("<th>run 5</th>" in shown) == (rows == 5)
