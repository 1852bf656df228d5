"""Shared by every test: the package under test is this checkout's, never another one on the path."""

from __future__ import annotations

import gc
from pathlib import Path

import nestforge
import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
# Folders and files whose tests trace, compile or train, and the fixtures of others that do.
COMPILING = (
    *("e2e", "hostile", "unit/benchmarks", "unit/compiler", "unit/examples", "unit/exporters", "unit/integrations"),
    "unit/parity",
    *("unit/runtime/engines/test_openvino.py", "unit/runtime/generation/test_drafting.py", "unit/test_traces.py"),
    *("unit/runtime/generation/test_source_plans.py", "unit/tools/test_bundle_bench.py", "unit/tools/test_console.py"),
    *(f"unit/tools/commands/test_{name}.py" for name in ("bench", "checks", "commands", "compile")),
)
COMPILED = {"compiled"}


# No test asserts wall-clock time, so none may fail for being slow on a busy machine.
settings.register_profile("nestforge", deadline=None)
settings.load_profile("nestforge")


def pytest_configure() -> None:
    found = Path(nestforge.__file__).resolve().parent
    if found != ROOT:
        raise pytest.UsageError(f"nestforge is imported from {found}, not from {ROOT}: use `make test` in this folder")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make check` leaves out."""
    places = [ROOT / "tests" / place for place in COMPILING]
    for item in items:
        fixtures = {*getattr(item, "fixturenames", ())}
        if COMPILED & fixtures or any(item.path.is_relative_to(place) for place in places):
            item.add_marker("compiles")


def pytest_collection_finish() -> None:
    """Torch and transformers are half a million objects that stay: no collection has to go through them again.

    An export makes a million more, and by default the oldest are gone through at every 70,000."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)
