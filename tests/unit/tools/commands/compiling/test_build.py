"""``nestforge build`` on tests/support/fake_tensorrt.py: no plan is really built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BuildError
from nestforge.runtime.summary.short_names import ShortNames
from nestforge.tools.commands.compiling.build import command
from support.fake_cuda import World
from support.fake_tensorrt import installed
from support.sealing import reseal

GOLDEN = Path(__file__).parents[4] / "golden"

if TYPE_CHECKING:
    from ..conftest import Compiled


def test_plans_are_listed(compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle = Path(shutil.copytree(compiled.bundle, tmp_path / "tiny.bundle"))
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    for engine in manifest["engines"]:
        engine["backend"] = "tensorrt"
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    reseal(bundle)
    with installed(World()):
        first = CliRunner().invoke(command, [str(bundle)], catch_exceptions=False)
        again = CliRunner().invoke(command, [str(bundle), "--json"], catch_exceptions=False)
    lines = first.stdout.splitlines()
    assert lines[0].split() == ["engine", "plan", "MB", "activations", "MB", "layers", "max", "abs", "built", "in"]
    table = lines[1 : lines.index("")]
    names = ShortNames({entry["id"]: entry["labels"][0] for entry in manifest["submodels"]})
    assert [line.split()[0] for line in table] == [names(engine["id"]) for engine in manifest["engines"]]
    assert "@" in names(manifest["engines"][0]["id"])
    assert lines[lines.index("") + 1].split() == ["submodel", "id"]
    assert lines[-1] == "plans for Fake GPU (compute capability 8.7, TensorRT 10.3.0)"
    plans = json.loads(again.stdout)
    assert all(plan["was_kept"] for plan in plans)
    assert {plan["entry"]["gpu"]["name"] for plan in plans} == {"Fake GPU"}


def test_a_bundle_for_another_backend_is_refused(compiled: Compiled) -> None:
    with pytest.raises(BuildError, match="has no engines for TensorRT"):
        CliRunner().invoke(command, [str(compiled.bundle)], catch_exceptions=False)


def test_graphs_that_keep_a_cache_get_plans_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle = Path(shutil.copytree(GOLDEN / "bundle-tensorrt", tmp_path / "tiny.bundle"))
    with installed(World(version="10.15.0")):
        done = CliRunner().invoke(command, [str(bundle)], catch_exceptions=False)
    lines = done.stdout.splitlines()
    engines = [line.split()[0] for line in lines[1 : lines.index("")]]
    manifest = open_bundle(bundle).manifest
    ids = ["ffn16-heads2@b1-s16", "ffn32-heads4@b1-s16", *(engine.id for engine in manifest.generation.engines)]
    assert engines == list(map(ShortNames.of(manifest), ids))
    assert len(engines) == 6
