"""Engines on a provider against their graphs, by the processor in the place of a GPU; nothing here ran on one."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.tensorrt.check_provider import check_on_provider
from nestforge.progress import silent
from nestforge.tools.commands import checks
from support.commands import error_of, json_of, nestforge, shown, usage_of
from support.fake_gpu import Gpu, played_sessions, provider_on
from support.generating import generating_folder


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generating_folder(tmp_path_factory) / "graphs"


def test_every_engine_is_compared(graphs: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones, and those of caches."""
    played_sessions(monkeypatch)
    bundle = open_bundle(graphs)
    found = check_on_provider(bundle, provider_on(gpu), silent)
    assert {one.engine for one in found} == {engine.id for engine in bundle.manifest.every_engine}
    assert not [one.problem for one in found if one.problem]
    assert all(one.parity is not None and one.parity.max_abs < 1e-4 for one in found)


def test_what_differs_is_said(graphs: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    played_sessions(monkeypatch, off_by=0.01)
    found = check_on_provider(open_bundle(graphs), provider_on(gpu), silent)
    assert all(one.parity is None for one in found)
    whole = [one.problem for one in found if one.problem and "on provider cuda: output" in one.problem]
    opened = [one.problem for one in found if one.problem and "on this GPU" in one.problem]
    assert whole
    assert opened
    assert len(whole) + len(opened) == len(found)


def test_the_command(graphs: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = graphs
    line = error_of("verify", bundle, "--provider", "cuda")
    assert line.endswith("; install nestforge[cuda] in place of nestforge[cpu]")
    assert "at most one of --against and --provider" in usage_of(
        "verify", bundle, "--provider", "cuda", "--against", bundle
    )
    monkeypatch.setattr(checks, "provider_named", lambda _: provider_on(gpu))
    played_sessions(monkeypatch)
    data = json_of("verify", bundle, "--provider", "cuda")
    assert (data["provider"], {one.get("problem") for one in data["engines"]}) == ("cuda", {None})
    assert "equal" in shown("verify", bundle, "--provider", "cuda")
    played_sessions(monkeypatch, off_by=0.01)
    failed = nestforge("verify", bundle, "--provider", "cuda")
    assert (failed.exit_code, "differs" in failed.stdout) == (1, True)
    assert " of 9 engines differ on provider cuda: engine " in failed.stderr.splitlines()[-1]
