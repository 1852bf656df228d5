"""``nestforge farm`` on a Ray of its own: one job fails, a worker is killed, and what was finished stays as it is."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.profiles.compile_request import CompileRequest
from nestforge.profiles.job_file import save_job
from nestforge.profiles.load_profile import dump_profile
from nestforge.whole_file import lock_holders
from safetensors.numpy import load_file, save_file
from support.commands import error_of
from support.tiny_compile import board, save_tiniest

pytest.importorskip("ray")
COMMAND = (sys.executable, "-m", "nestforge", "farm", "farm.yaml", "--json")


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two jobs times two profiles: one of a model whose weights are no numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("good", "bad"):
        save_tiniest(Path("models", name))
        save_job(CompileRequest(f"models/{name}", levels={"ffn": (0.25, 0.5, 1.0)}), Path(f"{name}.yaml"))
    weights = Path("models", "bad", "model.safetensors")
    save_file({name: array * np.nan for name, array in load_file(weights).items()}, weights)
    for number, name in enumerate("ab"):
        Path(f"{name}.yaml").write_text(dump_profile(board(memory_mb=100 + number, budgets={"full": {}})))
    Path("farm.yaml").write_text("jobs: [bad.yaml, good.yaml]\nprofiles: [a.yaml, b.yaml]\noutput: fleet\n")
    return tmp_path


def finished(fleet: Path) -> dict[str, tuple[int, int]]:
    return {
        one.parent.name: (one.stat().st_ino, one.stat().st_mtime_ns) for one in fleet.glob("*.bundle/manifest.json")
    }


def killed(fleet: Path, farm: subprocess.Popen[str]) -> str:
    """Kills the worker that compiles the first job behind the one that traces; the name of its bundle."""
    while farm.poll() is None:
        time.sleep(0.01)
        for lock in fleet.glob("*.partial/.lock") if finished(fleet) else ():
            try:
                with lock.open() as stream:
                    holder = lock_holders(stream.fileno()).split()
                if holder[0] == "process" and not lock.parent.with_suffix("").exists():
                    os.kill(int(holder[1]), signal.SIGKILL)
                    return lock.parent.name.removesuffix(".partial")
            except (FileNotFoundError, ProcessLookupError):
                continue
    raise AssertionError(farm.stderr.read() if farm.stderr else "")


def test_a_job_fails_a_worker_is_killed_and_nothing_is_compiled_twice(farm: Path) -> None:
    fleet = farm / "fleet"
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        lost = killed(fleet, running)
        before = finished(fleet)
        out, err = running.communicate()
    assert running.returncode == 1, err
    outcomes: list[dict[str, Any]] = json.loads(out)
    states = {one["name"]: one["state"] for one in outcomes}
    assert [*states] == ["bad-a", "bad-b", "good-a", "good-b"]
    assert {states[f"bad-{name}"] for name in "ab"} == {"failed"}
    assert "holds NaN or infinite values" in outcomes[0]["problem"]
    assert err.count(f"bad-a: {outcomes[0]['problem']}\n") == 1
    assert {states[name] for name in ("good-a", "good-b")} <= {"made", "kept"}
    assert lost not in before
    assert before.items() <= finished(fleet).items()
    assert len({(fleet / f"good-{name}.bundle" / "weights.safetensors").stat().st_ino for name in "ab"}) == 1
    for name in "ab":
        assert open_bundle(fleet / f"good-{name}.bundle", "full").manifest.provenance.profile["memory_mb"] >= 100

    # What failed is mended; the same command does that alone, and clears up.
    farm.joinpath("farm.yaml").write_text("jobs: [good.yaml]\nprofiles: [a.yaml, b.yaml]\noutput: fleet\n")
    known = finished(fleet)
    again = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    assert [one["state"] for one in json.loads(again.stdout)] == ["kept"] * 2
    assert finished(fleet) == known
    assert sorted(path.name for path in fleet.iterdir()) == [f"good-{name}.bundle" for name in "ab"]


def test_no_cluster_at_the_address(farm: Path) -> None:
    said = error_of("farm", "farm.yaml", "--address", "127.0.0.1:1")
    assert said.startswith("address '127.0.0.1:1': no Ray cluster is there (")
    assert not (farm / "fleet").exists()


def test_ray_is_not_installed(farm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert error_of("farm", "farm.yaml") == "ray is not installed: pip install 'nestforge[ray]'"
