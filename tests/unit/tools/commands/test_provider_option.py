"""``--provider`` of ``run`` and ``bench``, on the processor as a provider and on a host that has no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from nestforge.bucket import Bucket
from nestforge.runtime import load
from nestforge.runtime.inputs.files import read_npz
from nestforge.tools import bundle_bench, functions
from nestforge.tools.cli import main
from support.exit_bundles import requests, write_exits_bundle
from support.host_provider import host_provider


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_exits_bundle(tmp_path / "b", [Bucket(1, 8), Bucket(4, 8)])


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    import numpy as np

    np.savez(tmp_path / "inputs.files", **requests([8, 3]))  # type: ignore[arg-type]  # the stubs take a flag by keyword
    assert read_npz(tmp_path / "inputs.files", 2**20).keys() == {"input_ids", "attention_mask"}
    return tmp_path / "inputs.files"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (load, functions):
        monkeypatch.setattr(module, "provider_named", lambda name: None if name == "cpu" else host_provider())


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def test_run_says_where_it_ran(bundle: Path, inputs: Path, cuda: None) -> None:
    run = ["run", bundle, "--inputs", inputs, "--exits", "0.3", "--json"]
    plain, found = (json.loads(call(*run, *more).stdout) for more in ((), ("--provider", "cuda")))
    assert found["outputs"] == plain["outputs"]
    assert found["exits"] == plain["exits"]
    assert found["residency"] == "shared"
    assert "; by ONNX Runtime's provider host; exits: " in found["reason"]
    assert "provider" not in plain["reason"]


def test_bench_measures_there(compiled: Any, cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_bench, "_SECONDS", 0.0)
    data = json.loads(call("bench", compiled.bundle, "--submodel", "XL", "--provider", "cuda", "--json").stdout)
    assert {row["residency"] for row in data["engines"]} == {"shared"}
    assert all(row["memory_bytes"] is None and row["device_bytes"] >= 0 for row in data["engines"])
    assert data["compiled_for_this_host"] is False
    lines = call("bench", compiled.bundle, "--submodel", "XL", "--provider", "cuda").stdout.splitlines()
    assert "provider      cuda" in lines
    assert any(line.split("  ")[-1].strip() == "on the GPU MB" for line in lines)


@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_host_without_it_says_so_in_one_line(bundle: Path, inputs: Path, command: str, provider: str) -> None:
    more = ["--inputs", inputs] if command == "run" else []
    result = call(command, bundle, *more, "--provider", provider)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"nestforge: error: provider {provider}: onnxruntime ")
    assert line.endswith("; install nestforge[cuda] in place of nestforge[cpu]")


def test_an_unknown_provider_is_a_usage_error(bundle: Path) -> None:
    assert call("bench", bundle, "--provider", "gpu").exit_code == 2
