"""The list of plans: what it refuses, who may have written it, and which plan runs where."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from nestforge.bundle.device_files.plan_index import (
    PLANS_NAME,
    Gpu,
    PlanEntry,
    PlanParity,
    build_key,
    plan_for,
    read_plans,
    run_problem,
    with_plan,
    write_plans,
)
from nestforge.bundle.files import KEY_VARIABLE, plan_key, private_folder, sealed_json
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleFormatError, BundleIncompatibleError, OutputError
from nestforge.profiles.device_profile import TensorRTOptions
from nestforge.runtime.engines.tensorrt import problem as tensorrt_problem
from nestforge.runtime.engines.tensorrt import require_tensorrt
from support.sealing import edit_sealed

ORIN = Gpu("Orin", "8.7", "10.3.0")
OPTIONS = TensorRTOptions()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return tmp_path / "cache" / "nestforge"


@pytest.fixture
def bundle(own_bundle: Path, edit_manifest: Callable[..., None]) -> Bundle:
    edit_manifest(own_bundle, lambda data: [engine.update(backend="tensorrt") for engine in data["engines"]])
    return open_bundle(own_bundle)


def entry(bundle: Bundle, gpu: Gpu = ORIN, options: TensorRTOptions = OPTIONS, **changes: Any) -> PlanEntry:
    engine = bundle.manifest.engines[0]
    made = PlanEntry(
        graph=engine.file,
        file=f"{gpu.name}.plan",
        bytes=1,
        sha256="0" * 64,
        key=build_key(bundle, engine, gpu, options),
        gpu=gpu,
        options=options,
        activation_bytes=0,
        seconds=1.5,
        layers={"gemm": 2},
        parity=PlanParity("the graph", "exact", 1, 1e-7, 1.0),
    )
    return replace(made, **changes)


def test_the_list_is_read_back_as_it_was_written(bundle: Bundle) -> None:
    assert read_plans(bundle) == ()
    plans = [entry(bundle, Gpu("Z", "8.9", "10.3.0")), entry(bundle, options=TensorRTOptions(workspace_mb=64))]
    write_plans(bundle, plans)
    listed = read_plans(bundle)
    assert [replace(plan, code="") for plan in listed] == [plans[1], plans[0]]
    assert all(len(plan.code) == 64 for plan in listed)
    assert plan_for(bundle, bundle.manifest.engines[0], ORIN) == listed[0]
    write_plans(bundle, listed)
    assert read_plans(bundle) == listed


def test_a_new_plan_replaces_that_of_the_same_engine_and_device(bundle: Bundle) -> None:
    old, other, newer = entry(bundle), entry(bundle, replace(ORIN, tensorrt="11.4.0")), entry(bundle, seconds=9.0)
    assert with_plan([old, other], newer) == [other, newer]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "schema_version 'None', expected 1"),
        ('{"schema_version": 3, "plans": []}', "schema_version '3', expected 1"),
        ('{"schema_version": 1, "plans": [], "plans": []}', "a key stands twice"),
        (sealed_json({"schema_version": 1, "plan": []}).decode(), "unknown key 'plan'; did you mean 'plans'"),
        (sealed_json({"schema_version": 1, "plans": [{}]}).decode(), "missing key 'graph'"),
    ],
)
def test_a_list_that_is_none_is_refused(bundle: Bundle, text: str, message: str) -> None:
    (bundle.path / PLANS_NAME).write_text(text)
    with pytest.raises(BundleFormatError, match=message) as raised:
        read_plans(bundle)
    assert str(raised.value).startswith(str(bundle.path / PLANS_NAME))


@pytest.mark.parametrize("file", ["../other.plan", "/a.plan", "a.onnx", ".plan"])
def test_a_plan_outside_the_bundle_is_refused(bundle: Bundle, file: str) -> None:
    write_plans(bundle, [entry(bundle, file=file)])
    with pytest.raises(BundleFormatError, match="expected a plain name"):
        read_plans(bundle)


def test_a_list_behind_a_link_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text('{"schema_version": 1, "plans": []}')
    (bundle.path / PLANS_NAME).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(BundleFormatError, match="expected a regular file"):
        read_plans(bundle)


def refusal(bundle: Bundle, gpu: Gpu = ORIN) -> str:
    with pytest.raises(BundleIncompatibleError) as raised:
        plan_for(bundle, bundle.manifest.engines[0], gpu)
    return str(raised.value)


def test_without_a_plan_the_way_to_one_is_named(bundle: Bundle) -> None:
    assert refusal(bundle) == (
        f"engine ffn16@b1-s8: has no plan yet; run `nestforge build {bundle.path}` on this device"
    )


def test_the_fallback_is_named_where_there_is_one(bundle: Bundle) -> None:
    engines = bundle.manifest.engines
    more = (*engines, replace(engines[0], id="cpu", backend="onnxruntime"))
    both = replace(bundle, manifest=replace(bundle.manifest, engines=more))
    assert refusal(both).endswith("on this device, or use its engines for ONNX Runtime")


def test_a_plan_for_another_host_is_named_with_both(bundle: Bundle) -> None:
    write_plans(bundle, [entry(bundle), entry(bundle, replace(ORIN, name="T4", compute_capability="7.5"))])
    assert refusal(bundle, Gpu("L4", "8.9", "10.3.0")) == (
        "engine ffn16@b1-s8: Orin.plan: built for Orin (8.7), this host has L4 (8.9); "
        f"T4.plan: built for T4 (7.5), this host has L4 (8.9); run `nestforge build {bundle.path}` on this device"
    )


def test_a_plan_of_another_graph_or_other_weights_is_refused(bundle: Bundle) -> None:
    files = tuple(replace(f, sha256="1" * 64) for f in bundle.manifest.files)
    write_plans(bundle, [entry(bundle)])
    changed = replace(bundle, manifest=replace(bundle.manifest, files=files))
    assert "Orin.plan: it was built from another graph, other weights or by another release" in refusal(changed)


def test_a_plan_that_someone_else_made_is_refused(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is native code: whoever can write the bundle must not thereby run programs here."""
    write_plans(bundle, [entry(bundle)])
    # A plan that was put in its place.
    edit_sealed(bundle.path / PLANS_NAME, lambda data: data["plans"][0].update(sha256="f" * 64))
    assert "Orin.plan was not built with this host's plan key, and a plan is native code; run" in refusal(bundle)
    write_plans(bundle, [entry(bundle)])
    theirs = tmp_path / "their-key"
    theirs.write_bytes(plan_key())
    theirs.chmod(0o600)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-host"))
    assert f"or name the key of who built it in {KEY_VARIABLE}" in refusal(bundle)
    monkeypatch.setenv(KEY_VARIABLE, str(theirs))  # one key for a fleet
    assert plan_for(bundle, bundle.manifest.engines[0], ORIN).gpu == ORIN


@pytest.mark.parametrize(
    ("options", "gpu", "problem"),
    [
        ({}, ORIN, None),
        ({}, replace(ORIN, tensorrt="10.3.1"), "built by TensorRT 10.3.0, this host has 10.3.1"),
        ({}, replace(ORIN, name="Xavier"), "built for Orin (8.7), this host has Xavier (8.7)"),
        ({"version_compatible": True}, replace(ORIN, tensorrt="11.4.0.106"), None),
        (
            {"version_compatible": True},
            replace(ORIN, tensorrt="10.2.0.19"),
            "built by TensorRT 10.3.0, this host has the older 10.2.0.19",
        ),
        ({"hardware_compatibility": "same_compute_capability"}, replace(ORIN, name="Nano"), None),
        (
            {"hardware_compatibility": "same_compute_capability"},
            Gpu("L4", "8.9", "10.3.0"),
            "built for compute capability 8.7, L4 has 8.9",
        ),
        ({"hardware_compatibility": "ampere_plus"}, Gpu("Thor", "11.0", "10.3.0"), None),
        (
            {"hardware_compatibility": "ampere_plus"},
            Gpu("T4", "7.5", "10.3.0"),
            "built for compute capability 8.0 and higher, T4 has 7.5",
        ),
    ],
)
def test_where_a_plan_runs(bundle: Bundle, options: dict[str, Any], gpu: Gpu, problem: str | None) -> None:
    assert run_problem(entry(bundle, options=TensorRTOptions(**options)), gpu) == problem


@pytest.mark.parametrize(
    "change",
    [
        {"options": TensorRTOptions(tf32=True)},
        {"options": TensorRTOptions(workspace_mb=1)},
        {"gpu": replace(ORIN, name="Nano")},
        {"gpu": replace(ORIN, tensorrt="11.4.0.106")},
        {"gpu": replace(ORIN, compute_capability="8.9")},
    ],
)
def test_the_key_of_a_build_follows_from_all_that_shapes_a_plan(bundle: Bundle, change: dict[str, Any]) -> None:
    assert entry(bundle, **change).key != entry(bundle).key
    assert entry(bundle, options=TensorRTOptions(time_limit_s=5)).key == entry(bundle).key
    assert build_key(bundle, bundle.manifest.engines[1], ORIN, OPTIONS) != entry(bundle).key


def test_the_key_file_is_made_once_and_private(cache: Path) -> None:
    first = plan_key()
    assert len(first) == 32
    assert plan_key() == first
    path = cache / "tensorrt" / "plan-key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["plan-key"]
    path.chmod(0o644)
    with pytest.raises(OutputError, match=r"plan-key: others may read or change it; .*chmod 600"):
        plan_key()
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(OutputError, match="5 bytes, expected at least 32"):
        plan_key()


def test_a_folder_that_others_may_change_holds_nothing_private(cache: Path) -> None:
    folder = private_folder("tensorrt")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(OutputError, match=r"others may read or change it; .*chmod 700"):
        private_folder("tensorrt")


def test_what_is_missing_for_plans_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert tensorrt_problem() == "tensorrt is not installed; install nestforge[tensorrt]"
    with pytest.raises(BundleIncompatibleError, match=r"^bundle x: needs TensorRT: tensorrt is not installed"):
        require_tensorrt("bundle x")
    monkeypatch.delitem(sys.modules, "tensorrt")
    package = tmp_path / "tensorrt"
    package.mkdir()
    missing = "libnvinfer.so.10: cannot open shared object file:\nNo such file or directory"
    (package / "__init__.py").write_text(f"raise ImportError({missing!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert tensorrt_problem() == (
        "tensorrt does not load: libnvinfer.so.10: cannot open shared object file: No such file or directory"
    )
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert str(tensorrt_problem()).endswith("is not installed; install nestforge[tensorrt]")
