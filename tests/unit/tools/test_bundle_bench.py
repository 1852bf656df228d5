from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import SelectionError
from nestforge.profiles.device_profile import profile_data
from nestforge.profiles.load_profile import load_profile
from nestforge.runtime.engines.measure import LatencyStats
from nestforge.runtime.engines.residency import Residency
from nestforge.tools import bundle_bench
from support.exit_bundles import write_exits_bundle
from support.tiny_compile import board, save_tiniest


def test_a_segment_is_measured_on_its_own_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_bench, "_SECONDS", 0.0)
    bundle = open_bundle(write_exits_bundle(tmp_path / "b", [Bucket(1, 8)]))
    engine = next(engine for engine in bundle.manifest.engines if engine.segment == "to4")
    row = bundle_bench._bench(bundle, engine, engine.bucket, "shared", 1, None)
    assert row.engine == "depth4.to4@b1-s8"
    assert row.latency_ms.p50 > 0
    assert row.memory_bytes.resident > 0


def test_an_engine_of_int4_is_measured_packed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(write_exits_bundle(tmp_path / "b", [Bucket(1, 8)]))
    first, second, *others = bundle.manifest.engines
    engines = (first, replace(second, precision="int4"), *others)
    provenance = replace(bundle.manifest.provenance, profile=profile_data(load_profile("laptop-x86")))
    bundle = replace(bundle, manifest=replace(bundle.manifest, engines=engines, provenance=provenance))
    measured: dict[str, list[str]] = {}

    def bench(
        bundle: Bundle, engine: EngineEntry, shape: Bucket, residency: Residency, *_: object
    ) -> bundle_bench.EngineBench:
        measured.setdefault(engine.id, []).append(residency)
        return bundle_bench.EngineBench(engine.id, shape, residency, LatencyStats(1, 1.0, 1.0, 1.0, 0.0), None)

    monkeypatch.setattr(bundle_bench, "_bench", bench)
    bundle_bench.bench_bundle(bundle, [], lambda *_: None)
    assert measured.pop(second.id) == ["packed"]
    assert set(map(tuple, measured.values())) == {("shared", "packed", "mapped")}


def test_engines_of_a_range_run_where_budgets_are_judged_or_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_bench, "_SECONDS", 0.0)
    device = board(buckets=["1..2x1..8", "4x8"], budget_at="1x4", budgets={"full": {}})
    compile_bundle(save_tiniest(tmp_path / "model"), device, tmp_path / "b", include="budgets")
    bundle = open_bundle(tmp_path / "b")

    rows = bundle_bench.bench_bundle(bundle, [], lambda *_: None).engines
    assert {(row.engine, str(row.shape)) for row in rows} == {
        ("ffn32-heads2@b1_2-s1_8", "1x4"),
        ("ffn32-heads2@b4-s8", "4x8"),
    }
    rows = bundle_bench.bench_bundle(bundle, [], lambda *_: None, at=Bucket(2, 7)).engines
    assert {str(row.shape) for row in rows} == {"2x7", "4x8"}
    nodes = bundle_bench.profile_nodes(bundle, [], lambda *_: None, Bucket(2, 7)).engines
    assert [str(each.shape) for each in nodes] == ["2x7", "4x8"]
    with pytest.raises(SelectionError, match=r"^shape 3x8: expected one of a range .*, there is 1\.\.2x1\.\.8$"):
        bundle_bench.bench_bundle(bundle, [], lambda *_: None, at=Bucket(3, 8))
