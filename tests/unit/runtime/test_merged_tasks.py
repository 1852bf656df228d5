"""Tasks that a model is opened with in its weights: named, counted, refused in one line."""

from __future__ import annotations

from pathlib import Path

import nestforge
import pytest
from nestforge.bundle.entries.task_entry import BASE
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleIncompatibleError, InputError, NestforgeError, SelectionError
from nestforge.runtime.merged_tasks import merged_bytes

GOLDEN = Path(__file__).parents[2] / "golden"
BUNDLE = GOLDEN / "bundle-merged"
TEXT = "the quick brown fox"


@pytest.mark.parametrize(
    ("bundle", "merge", "error", "said"),
    [
        ("bundle-merged", "a", InputError, "merge: expected a list of tasks by name, got 'a'"),
        ("bundle-merged", [1], InputError, r"merge: expected a list of tasks by name, got \[1\]"),
        ("bundle-merged", 5, InputError, "merge: expected a list of tasks by name, got 5"),
        ("bundle-merged", None, InputError, "merge: expected a list of tasks by name, got None"),
        ("bundle-merged", ["b"], SelectionError, "merge: no task 'b' in bundle"),
        ("bundle-ranges", ["a"], SelectionError, "merge: no task 'a' in bundle"),
        ("bundle-tasks", ["both"], BundleIncompatibleError, "can be merged into; compile it with `mergeable=True`"),
    ],
)
def test_what_cannot_be_merged_is_refused(bundle: str, merge: object, error: type[NestforgeError], said: str) -> None:
    with pytest.raises(error, match=said):
        nestforge.load(GOLDEN / bundle, merge=merge)  # type: ignore[arg-type]


def test_engines_of_merged_tasks_count_under_a_cap() -> None:
    held = merged_bytes([open_bundle(BUNDLE).with_merged(BASE)])
    assert 1e-6 * held > 0.06, "two engines, packed"
    with pytest.raises(SelectionError, match=r"take 0\.\d MB, 0\.\d MB of it merged ones; merge fewer, or"):
        nestforge.load(BUNDLE, memory_mb=held / 1e6, merge=["a"])
    with nestforge.load(BUNDLE, memory_mb=2 * held / 1e6, merge=["a"]) as model:
        assert "merged" in model(TEXT, task="a").engine
        assert "merged" not in model(TEXT).engine


def test_they_are_packed_whatever_others_are_and_opened_with_them() -> None:
    with nestforge.load(BUNDLE, residency="shared", merge=["a"], preload=True) as model:
        assert all(pool.is_open(engine) for pool in model._merged.values() for engine in pool.bundle.manifest.engines)
        own, base = model(TEXT, task="a"), model(TEXT)
        assert (own.residency, base.residency) == ("packed", "shared")


def test_a_budget_is_judged_by_the_engines_that_answer() -> None:
    with nestforge.load(BUNDLE, merge=["a"]) as model:
        choice = model.choose(1, 16, task="a")
        assert "merged" in choice.engine.id
        (latency,) = [one for one in model.bundle.build.latencies if one.engine == choice.engine.id]
        assert choice.stated_ms == (latency.measured_p50_ms or latency.predicted_ms)
        assert choice.stated_ms != model.choose(1, 16).stated_ms
