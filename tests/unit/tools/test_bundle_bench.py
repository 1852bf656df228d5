import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import SelectionError
from nestforge.profiles.device_profile import profile_data
from nestforge.profiles.load_profile import load_profile
from nestforge.runtime.engines.measure import LatencyStats, MemoryUse
from nestforge.runtime.engines.residency import Residency
from nestforge.runtime.model import ElasticModel
from nestforge.tools import bundle_bench, traffic_bench
from nestforge.tools.traffic_bench import Band, bench_requests, lengths_of
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
    bundle_bench.bench(bundle)
    assert measured.pop(second.id) == ["packed"]
    assert set(map(tuple, measured.values())) == {("shared", "packed", "mapped")}


def test_engines_of_a_range_run_where_budgets_are_judged_or_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_bench, "_SECONDS", 0.0)
    monkeypatch.setattr(bundle_bench, "memory_use", lambda *_: MemoryUse(1, 1))
    device = board(buckets=["1..2x1..8", "4x8"], budget_at="1x4", budgets={"full": {}})
    compile_bundle(save_tiniest(tmp_path / "model"), device, tmp_path / "b", include="budgets")
    bundle = open_bundle(tmp_path / "b")

    rows = bundle_bench.bench(bundle).engines
    assert {(row.engine, str(row.shape)) for row in rows} == {
        ("ffn32-heads2@b1_2-s1_8", "1x4"),
        ("ffn32-heads2@b4-s8", "4x8"),
    }
    rows = bundle_bench.bench(bundle, at=Bucket(2, 7)).engines
    assert {str(row.shape) for row in rows} == {"2x7", "4x8"}
    nodes = bundle_bench.profile_nodes(bundle, [], lambda *_: None, Bucket(2, 7)).engines
    assert [str(each.shape) for each in nodes] == ["2x7", "4x8"]
    with pytest.raises(SelectionError, match=r"^shape 3x8: expected one of a range .*, there is 1\.\.2x1\.\.8$"):
        bundle_bench.bench(bundle, at=Bucket(3, 8))


GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "bundle-texts"  # one bucket, 1x16, and texts of 14 tokens


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[ElasticModel]:
    monkeypatch.setattr(traffic_bench, "_SECONDS", 0.0)
    with nestforge.load(GOLDEN, threads=1) as opened:
        yield opened


def test_lengths_in_bands_that_double() -> None:
    found = lengths_of([3, 16, 17, 100], 9)
    assert (found.texts, found.found, found.median, found.longest) == (4, 9, 16.5, 100)
    assert found.bands == (Band(1, 16, 2, 0.5), Band(17, 32, 1, 0.25), Band(33, 64, 0, 0.0), Band(65, 128, 1, 0.25))
    assert lengths_of([16], 1).bands == (Band(1, 16, 1, 1.0),)


def test_every_text_is_sent_and_cut_where_it_is_too_long(model: ElasticModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    call = ElasticModel.__call__

    def kept(self: ElasticModel, inputs: Any, **asked: Any) -> Any:
        sent.append(inputs)
        return call(self, inputs, **asked)

    monkeypatch.setattr(ElasticModel, "__call__", kept)
    texts = [f"{'a ' * n}fox" for n in range(30)]
    events: list[tuple[str, int, int]] = []
    result = bench_requests(model, ["50%"], texts=texts, progress=lambda *event: events.append(event))
    (row,) = result.submodels
    assert (row.submodel, row.requests, row.latency_ms.runs) == ("ffn16-heads1", 30, 30)
    warm_ups, requests = sent[:-30], sent[-30:]
    assert set(warm_ups) < set(texts)
    assert sorted(requests) == sorted(texts)
    assert requests != texts, "in a mixed order"
    assert row.truncated == sum(tokens > 14 for tokens in model.token_counts(texts))
    assert row.per_second > 0
    assert result.lengths == lengths_of(model.token_counts(texts), 30)
    assert events == [("traffic", 0, 1), ("traffic", 1, 1)]


def test_more_texts_than_are_sent_are_drawn_alike_each_time(
    model: ElasticModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic_bench, "_MOST_TEXTS", 5)
    texts = [f"{'a ' * n}fox" for n in range(12)]
    first, second = (bench_requests(model, ["50%"], texts=texts).lengths for _ in range(2))
    assert first == second
    assert (first.texts, first.found) == (5, 12)


def test_requests_come_from_as_many_threads_as_were_requested(
    model: ElasticModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: set[int] = set()
    together = threading.Barrier(3, timeout=60)
    call = ElasticModel.__call__

    def waits(self: ElasticModel, inputs: Any, **asked: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and threading.get_ident() not in callers:
            callers.add(threading.get_ident())
            together.wait()  # passes only when three requests are under way at once
        return call(self, inputs, **asked)

    monkeypatch.setattr(ElasticModel, "__call__", waits)
    result = bench_requests(model, ["100%"], concurrency=3)
    assert len(callers) == 3
    assert (result.concurrency, result.threads, result.lengths) == (3, 1, None)
    assert result.submodels[0].requests >= 60


def test_every_submodel_is_asked_unless_some_are_named(model: ElasticModel) -> None:
    every = [entry.id for entry in model.bundle.manifest.submodels]
    assert [row.submodel for row in bench_requests(model, []).submodels] == every
    assert [row.submodel for row in bench_requests(model, ["100%", every[-1]]).submodels] == [every[-1]]
    with pytest.raises(nestforge.SelectionError, match="no submodel 'XXL' in this bundle"):
        bench_requests(model, ["XXL"])


def test_texts_need_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_bench, "_SECONDS", 0.0)
    with nestforge.load(write_exits_bundle(tmp_path / "b", [Bucket(2, 8)]), threads=1) as model:
        assert bench_requests(model, ["depth4"]).submodels[0].requests == 20
        with pytest.raises(nestforge.InputError, match="has no tokenizer"):
            bench_requests(model, [], texts=["a"])


def test_a_request_that_fails_ends_the_measurement(model: ElasticModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_bench, "_WARM_UPS", 1)
    with pytest.raises(nestforge.InputError, match="half of a surrogate pair"):
        bench_requests(model, [], texts=["a", "\ud800"], concurrency=2)
