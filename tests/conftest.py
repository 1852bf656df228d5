"""Shared by every test: the package under test is this checkout's, never another one on the path."""

from __future__ import annotations

import gc
from pathlib import Path

import nestforge
import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
# Folders whose tests trace, compile or train, and the fixtures of others that do.
COMPILING = (
    *("e2e", "hostile", "unit/benchmarks", "unit/compiler", "unit/examples", "unit/exporters", "unit/integrations"),
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
    folders = [ROOT / "tests" / folder for folder in COMPILING]
    for item in items:
        fixtures = {*getattr(item, "fixturenames", ())}
        if COMPILED & fixtures or any(item.path.is_relative_to(folder) for folder in folders):
            item.add_marker("compiles")


def pytest_collection_finish() -> None:
    """Torch and transformers are half a million objects that stay: no collection has to go through them again.

    An export makes a million more, and by default the oldest are gone through at every 70,000."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)
