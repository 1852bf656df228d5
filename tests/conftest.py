"""Shared by every test: the package under test is this checkout's, never another one on the path."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import nestforge
import pytest
from hypothesis import settings
from nestforge.profiles.backends import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
# Folders and files whose tests trace, compile or train, start Ray or offer load, and the fixtures of others that do.
COMPILING = (
    *("e2e", "hostile", "unit/benchmarks", "unit/compiler", "unit/examples", "unit/exporters", "unit/integrations"),
    "unit/parity",
    *(f"unit/runtime/engines/test_{name}.py" for name in BACKENDS),
    "unit/runtime/test_dimensions.py",
    *(
        f"unit/runtime/generation/test_{name}.py"
        for name in ("drafting", "encoder_decoder", "plans", "source_plans", "states")
    ),
    *(f"unit/runtime/engines/{name}/test_cached_runner.py" for name in ("onnxruntime_gpu", "tensorrt")),
    *("unit/serving/test_classes.py", "unit/serving/test_replicas.py", "unit/test_traces.py"),
    *("unit/tools/test_bundle_bench.py", "unit/tools/test_console.py"),
    *(
        f"unit/tools/commands/test_{name}.py"
        for name in ("bench", "checks", "commands", "compile", "export", "loadtest")
    ),
)
PLACES = frozenset(ROOT / "tests" / place for place in COMPILING)
COMPILED = {"compiled"}


gc.disable()  # until all is imported, which stays
# No test asserts wall-clock time, so none may fail for being slow on a busy machine.
settings.register_profile("nestforge", deadline=None, max_examples=60)
settings.load_profile("nestforge")


def pytest_configure() -> None:
    found = Path(nestforge.__file__).resolve().parent
    if found != ROOT:
        raise pytest.UsageError(f"nestforge is imported from {found}, not from {ROOT}: use `make test` in this folder")
    import torch  # noqa: F401  (which sets up its loggers)

    # pytest listens to loggers that do not propagate, and what torch tells this one of an export takes long to say.
    logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """No machine of tests loses its power within one: a compile waits for the disk for some 4 % of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


@pytest.fixture
def blatant(monkeypatch: pytest.MonkeyPatch) -> None:
    """For faults far beyond any rounding: before they are believed, PyTorch's own is measured 2 more times, not 31."""
    monkeypatch.setattr("nestforge.compiler.parity.reference._NUDGED_PASSES", 2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make check` does not even import what it leaves out."""
    return True if config.option.markexpr == "not compiles" and collection_path in PLACES else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make check` leaves out."""
    compiling = {path for path in {item.path for item in items} if PLACES & {path, *path.parents}}
    for item in items:
        if item.path in compiling or COMPILED & {*getattr(item, "fixturenames", ())}:
            item.add_marker("compiles")


def pytest_collection_finish() -> None:
    """Torch and transformers are half a million objects that stay: no collection has to go through them again.

    An export makes a million more, and by default the oldest are gone through at every 70,000."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)
    gc.enable()
