from __future__ import annotations

from dataclasses import replace

from nestforge.bundle.entries.engine_entry import EngineEntry, ParityRouting, RoutingEntry, Whole
from nestforge.bundle.manifest import Manifest
from nestforge.runtime.summary.engine_details import common_details, detail_tables


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
