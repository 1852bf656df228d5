"""``load``: a full check reads every byte of a bundle's folder, whoever added it."""

import hashlib
import shutil
from pathlib import Path

import nestforge
import pytest
from nestforge.bundle.device_files.device_file import this_host
from nestforge.bundle.device_files.measurements import HostMeasurement, Measurements
from nestforge.bundle.device_files.plan_index import Gpu, PlanEntry, PlanParity, write_plans
from nestforge.bundle.manifest import BUILD_NAME, REPORT_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleCorruptError, BundleError
from nestforge.profiles.device_profile import TensorRTOptions
from nestforge.runtime.engines.onnxruntime.runner import OnnxRuntimeRunner
from nestforge.runtime.exits.policy import Calibration, save_policy
from nestforge.runtime.generation.draft_gains import DraftCalibration, HostDrafts
from nestforge.runtime.load import verify_bytes
from support.exit_bundles import policy
from support.sealing import edit_sealed

GOLDEN = Path(__file__).parents[2] / "golden"


def with_drafts_and_plans(folder: Path) -> None:
    """Files that `measure`, `calibrate` and `build` add to a bundle that generates."""
    bundle, here = open_bundle(folder), (this_host(), 2, "2026-11-22T10:00:00+00:00")
    Measurements.save(bundle, HostMeasurement(*here, ()))
    DraftCalibration.save(bundle, HostDrafts(*here, 5, (), ()))
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
    save_policy(bundle, policy(), default=True)
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


@pytest.fixture
def calibrated(exits_bundle: Path, tmp_path: Path) -> Path:
    """A bundle with one policy."""
    folder = Path(shutil.copytree(exits_bundle, tmp_path / "own.bundle"))
    bundle = open_bundle(folder)
    save_policy(bundle, policy(), default=True)
    return folder


def test_what_is_whole(calibrated: Path) -> None:
    checked = verify_bytes(calibrated)
    assert (checked.policies, checked.plans, checked.files) == (1, 0, len(checked.bundle.manifest.files))
    assert str(checked).endswith(" MB, 1 calibrated policies, every hash and seal as written")


def test_the_report_is_compared_and_never_needed(calibrated: Path) -> None:
    (calibrated / REPORT_NAME).write_text("# report")
    digest = hashlib.sha256(b"# report").hexdigest()
    edit_sealed(calibrated / BUILD_NAME, lambda record: record.update(report_sha256=digest))
    verify_bytes(calibrated)
    (calibrated / REPORT_NAME).write_text("# another")
    with pytest.raises(BundleCorruptError, match=rf"report\.md: sha256 \w+, expected {digest}"):
        verify_bytes(calibrated)
    (calibrated / REPORT_NAME).unlink()
    with pytest.raises(BundleCorruptError, match=r"report\.md: missing"):
        verify_bytes(calibrated)
    open_bundle(calibrated)


def test_an_interrupted_calibration_leaves_what_was_there(calibrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, before = open_bundle(calibrated), verify_bytes(calibrated)
    more = Calibration.made_for(bundle, {}, ()).with_policy(policy("other"), default=True)
    for name in ("fsync", "replace"):  # before the disk has it, and before it has the file's name
        with monkeypatch.context() as patch:
            patch.setattr(f"os.{name}", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                more.write(bundle)
        assert verify_bytes(calibrated) == before
    more.write(bundle)
    kept = Calibration.read(verify_bytes(calibrated).bundle)
    assert kept == more


def test_engines_of_some_submodels_open_alone(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = OnnxRuntimeRunner.__enter__

    def enter(self: OnnxRuntimeRunner) -> OnnxRuntimeRunner:
        opened.append(self.engine.submodel)
        return real(self)

    monkeypatch.setattr(OnnxRuntimeRunner, "__enter__", enter)
    with nestforge.load(tiny_bundle) as model:
        model.open_engines({"ffn16"})
        assert set(opened) == {"ffn16"}
        model.open_engines()
        assert set(opened) == {one.id for one in model.submodels}
        assert len(opened) == len(model.bundle.manifest.engines)
