"""The driver of threads, a few crowds of it, and that it sees what it is there for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.runtime.engines import runner as engine_runner
from nestforge.runtime.engines.onnxruntime.runner import OnnxRuntimeRunner

from hostile import threads
from hostile.drive import drive
from hostile.outcomes import described
from hostile.threads import Site
from hostile.worker import GOLDEN, golden_bundles


def test_crowds_are_answered_as_each_request_alone() -> None:
    bundles = len(golden_bundles())
    report = drive("threads", range(bundles + 2))
    assert not report.findings, described(report.findings, "threads")
    assert report.total > threads.ASKING * threads.EACH * (bundles + 2)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(threads, "ASKING", 4)
    monkeypatch.setattr(threads, "EACH", 20)
    monkeypatch.setattr(threads, "_SETTLES_S", 0.2)
    return Site("tiny", GOLDEN / "bundle-texts")


def test_an_answer_that_another_request_changed_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    run = OnnxRuntimeRunner.run
    kept: list[Any] = []

    def shared(runner: OnnxRuntimeRunner, *args: Any) -> Any:
        outputs = run(runner, *args)
        kept.append(None)
        if len(kept) == 30:
            outputs[0][...] = np.nan
        return outputs

    monkeypatch.setattr(OnnxRuntimeRunner, "run", shared)
    assert site.attempt(0).outcome == "wrong"


def test_what_escapes_from_a_thread_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = OnnxRuntimeRunner.run, []

    def fails(runner: OnnxRuntimeRunner, *args: Any) -> Any:
        calls.append(None)
        if len(calls) == 30:
            raise RuntimeError("lost")
        return run(runner, *args)

    monkeypatch.setattr(OnnxRuntimeRunner, "run", fails)
    result = site.attempt(0)
    assert (result.outcome, str(result.message).splitlines()[0]) == ("escaped", "RuntimeError: lost")


def test_what_stays_when_all_is_closed_is_found(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert site.attempt(0).outcome == "same"
    held = []
    monkeypatch.setattr(engine_runner.EnginePool, "close", lambda pool: held.append((tmp_path / "f").open("w")))
    result = site.attempt(1)
    assert result.outcome == "leaked"
    assert "open files after" in result.message or "still mapped" in result.message
    for file in held:
        file.close()
