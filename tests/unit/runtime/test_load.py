"""``load``: a full check reads every byte of a bundle's folder, whoever added it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import nestforge
import pytest
from nestforge.bundle.device_files.device_file import this_host
from nestforge.bundle.device_files.measurements import HostMeasurement, keep_measurement
from nestforge.bundle.device_files.plan_index import Gpu, PlanEntry, PlanParity, write_plans
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleError
from nestforge.profiles.device_profile import TensorRTOptions
from nestforge.runtime.exits.calibration import empty_calibration, write_calibration
from nestforge.runtime.generation.draft_gains import HostDrafts, keep_drafts
from support.exit_policies import policy

GOLDEN = Path(__file__).parents[2] / "golden"


def with_drafts_and_plans(folder: Path) -> None:
    """What `measure`, `calibrate` and `build` add to a bundle that generates."""
    bundle, here = open_bundle(folder), (this_host(), 2, "2026-11-22T10:00:00+00:00")
    keep_measurement(bundle, HostMeasurement(*here, ()))
    keep_drafts(bundle, HostDrafts(*here, 5, (), ()))
    plan, parity = b"native code", PlanParity("the graph", "exact", 1, 0.0, 1.0)
    (folder / "x.plan").write_bytes(plan)
    digest, gpu = hashlib.sha256(plan).hexdigest(), Gpu("Fake GPU", "8.7", "10.3.0")
    graph = bundle.manifest.engines[0].file
    write_plans(bundle, [PlanEntry(graph, "x.plan", len(plan), digest, "", gpu, TensorRTOptions(), 0, 0.0, {}, parity)])


def test_a_full_check_refuses_one_changed_byte_in_any_file(
    exits_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    generating, tasks, exits = (tmp_path / name for name in ("generating", "tasks", "exits"))
    shutil.copytree(GOLDEN / "bundle-decoder", generating)
    shutil.copytree(GOLDEN / "bundle-merged", tasks)
    shutil.copytree(exits_bundle, exits)
    with_drafts_and_plans(generating)
    bundle = open_bundle(exits)
    write_calibration(bundle, empty_calibration(bundle).with_policy(policy(), default=True))
    found = set()
    for folder in (generating, tasks, exits):
        nestforge.load(folder, check="full").close()
        for path in sorted(folder.iterdir()):
            whole = path.read_bytes()
            damaged = bytearray(whole)
            damaged[len(whole) // 2] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(BundleError, match=path.name):
                nestforge.load(folder, check="full")
            path.write_bytes(whole)
            found.add(path.name)
    assert found >= {"tasks.json", "drafts.json", "plans.json", "x.plan", "calibration.json", "measurements.json"}
    assert found >= {"manifest.json", "build.json", "weights.safetensors", "ranking.safetensors", "report.md"}
