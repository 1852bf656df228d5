from __future__ import annotations

from pathlib import Path

import pytest
from exit_bundles import write_exits_bundle
from nestforge.elastic import Bucket
from nestforge.runtime.bundle import open_bundle
from nestforge.tools import bundle_bench


def test_a_segment_is_measured_on_its_own_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_bench, "_SECONDS", 0.0)
    bundle = open_bundle(write_exits_bundle(tmp_path / "b", [Bucket(1, 8)]))
    engine = next(engine for engine in bundle.manifest.engines if engine.segment == "to4")
    row = bundle_bench._bench(bundle, engine, "shared", 1, None)
    assert row.engine == "depth4.to4@b1-s8"
    assert row.latency_ms.p50 > 0
    assert row.memory_bytes.resident > 0
