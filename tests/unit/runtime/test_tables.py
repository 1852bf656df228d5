from __future__ import annotations

from dataclasses import replace

from nestforge.runtime.manifest import BuildRecord, Manifest
from nestforge.runtime.tables import engine_table

RECORD = BuildRecord(1, "0" * 64, "2026-11-21T00:00:00Z", (), {}, {}, ())


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
