from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleError
from nestforge.runtime.engines import pool as engine_pool
from nestforge.runtime.engines.pool import EnginePool


def test_engines_of_one_file_are_opened_once(exits_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = engine_pool.runner_for

    def counting(bundle: Any, engine: Any, *rest: Any) -> Any:
        opened.append(engine.file)
        return real(bundle, engine, *rest)

    monkeypatch.setattr(engine_pool, "runner_for", counting)
    bundle = open_bundle(exits_bundle)
    pool = EnginePool(bundle, {engine.id: "shared" for engine in bundle.manifest.engines}, 1)
    by_file: dict[str, set[int]] = {}
    for engine in bundle.manifest.engines:
        by_file.setdefault(engine.file, set()).add(id(pool.get(engine)))
    assert sorted(opened) == sorted(by_file)
    assert all(len(runners) == 1 for runners in by_file.values())
    assert len(opened) < len(bundle.manifest.engines)
    pool.close()
    with pytest.raises(BundleError, match="the model is closed"):
        pool.get(bundle.manifest.engines[0])
