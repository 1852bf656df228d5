"""``build_plans`` on tests/support/fake_tensorrt.py: no plan is really built or run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from nestforge.bundle.device_files.plan_index import read_plans
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.tensorrt.build_bundle import build_plans
from nestforge.compiler.tensorrt.graphs import require_supported
from nestforge.errors import BuildError, BundleCorruptError, BundleIncompatibleError, NestforgeError, ParityError
from nestforge.runtime.engines.onnxruntime.runner import OnnxRuntimeRunner
from nestforge.runtime.inputs.arrays import random_feeds
from support.fake_cuda import World
from support.sealing import reseal

GPU = "Fake GPU (compute capability 8.7, TensorRT 10.3.0)"


def with_options(folder: Path, **options: Any) -> Path:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["provenance"]["profile"]["tensorrt"] = options
    (folder / "manifest.json").write_text(json.dumps(manifest))
    reseal(folder)
    return folder


def test_every_engine_gets_a_plan_that_equals_its_graph(compiled: Path, world: World) -> None:
    from nestforge.runtime.engines.tensorrt.runner import TensorRTRunner

    files = {path.name: path.read_bytes() for path in compiled.iterdir()}
    stages: list[tuple[str, int, int]] = []
    built = build_plans(compiled, lambda *stage: stages.append(stage))
    bundle = open_bundle(compiled, check="full")
    assert [plan.engine for plan in built] == [engine.id for engine in bundle.manifest.engines]
    assert {name: (compiled / name).read_bytes() for name in files} == files  # the bundle stays as it is
    assert [entry.graph for entry in read_plans(open_bundle(compiled))] == sorted(plan.entry.graph for plan in built)
    for plan, engine in zip(built, bundle.manifest.engines, strict=True):
        assert not plan.was_kept
        assert str(plan.entry.gpu) == GPU
        assert plan.entry.layers == {"Reformat": 1, "gemm": 1}
        assert plan.entry.activation_bytes == 4096
        assert plan.entry.parity.cases == 4
        assert plan.entry.parity.max_abs < 1e-5
        feeds = random_feeds(bundle.manifest.inputs, engine.bucket, 9)
        with TensorRTRunner(bundle, engine) as runner, OnnxRuntimeRunner(bundle, engine, "shared", 1) as graph:
            for found, expected in zip(runner.run(feeds), graph.run(feeds), strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert stages[0] == ("plans", 0, 4)
    assert stages[1:3] == [("Building", 0, 3), ("Building", 1, 3)]
    assert stages[-1] == ("plans", 4, 4)


def test_the_builder_is_asked_for_what_the_profile_says(compiled: Path, world: World) -> None:
    build_plans(compiled)
    config = {**world.config, "flags": set(world.config["flags"])}
    assert config["flags"] == {"STRIP_PLAN"}
    assert (config["builder_optimization_level"], config["hardware_compatibility_level"].name) == (3, "NONE")
    assert config["profiling_verbosity"].name == "DETAILED"
    assert "WORKSPACE" not in config
    assert config["profiles"] == []  # every shape is static
    options = {"workspace_mb": 64, "optimization_level": 5, "tf32": True, "strip_weights": False}
    with_options(compiled, **options, version_compatible=True, hardware_compatibility="ampere_plus")
    build_plans(compiled)
    assert world.config["flags"] == {"TF32", "VERSION_COMPATIBLE"}
    assert world.config["WORKSPACE"] == 64_000_000
    assert world.config["builder_optimization_level"] == 5
    assert world.config["hardware_compatibility_level"].name == "AMPERE_PLUS"


def test_what_is_done_is_not_done_again(compiled: Path, world: World) -> None:
    first = build_plans(compiled)
    world.calls.clear()
    second = build_plans(compiled)
    listed = {entry.graph: entry for entry in read_plans(open_bundle(compiled))}
    assert [plan.entry for plan in second] == [listed[plan.entry.graph] for plan in first]
    assert all(plan.was_kept for plan in second)
    assert world.calls == []
    (compiled / first[0].entry.file).write_bytes(b"damaged")
    with_options(compiled, time_limit_s=600)  # how long a build may take changes no plan
    third = build_plans(compiled)
    assert [plan.was_kept for plan in third] == [False, True, True, True]
    with_options(compiled, optimization_level=4)
    assert not any(plan.was_kept for plan in build_plans(compiled))


def test_timings_are_kept_for_later_builds(compiled: Path, world: World, tmp_path: Path) -> None:
    build_plans(compiled)
    (path,) = (tmp_path / "cache" / "nestforge" / "tensorrt").glob("*.timing")
    assert path.name == "Fake-GPU-8.7-10.3.0.timing"
    assert path.stat().st_mode & 0o077 == 0
    names = [engine.file.encode() for engine in open_bundle(compiled).manifest.engines]
    assert all(name in path.read_bytes() for name in names)
    path.write_bytes(b"damaged")
    with_options(compiled, optimization_level=1)
    build_plans(compiled)
    assert all(name in path.read_bytes() for name in names)


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (
            {"parses": False},
            {},
            BuildError,
            r"TensorRT 10.3.0 cannot read ffn8-.*onnx: No importer registered for op",
        ),
        (
            {"builds": False},
            {},
            BuildError,
            "TensorRT 10.3.0 built no plan: Could not find any implementation",
        ),
        (
            {"starts": False},
            {},
            BuildError,
            "TensorRT 10.3.0 does not start: CUDA initialization failure with error",
        ),
        ({"off_by": 0.1}, {}, ParityError, r"its plan: output \w+, case seed 0 at 2x8: max abs 0.1.*; allowed abs <="),
        ({"opens": False}, {}, BundleIncompatibleError, "cannot open this plan: Version tag does not match"),
        (
            {},
            {"hardware_compatibility": "same_compute_capability"},
            BuildError,
            "TensorRT 10.3.0 has no hardware_compatibility 'same_compute_capability'; use 'ampere_plus' or 'none'",
        ),
    ],
    ids=["parse", "build", "start", "parity", "open", "compatibility"],
)
def test_a_build_that_fails_leaves_nothing(
    compiled: Path,
    world: World,
    change: dict[str, Any],
    options: dict[str, Any],
    error: type[NestforgeError],
    message: str,
) -> None:
    with_options(compiled, **options)
    before = sorted(path.name for path in compiled.iterdir())
    for name, value in change.items():
        setattr(world, name, value)
    with pytest.raises(error, match=message) as raised:
        build_plans(compiled)
    assert str(raised.value).startswith("engine ffn8-heads1@b2-s8: ")
    assert "\n" not in str(raised.value)
    assert sorted(path.name for path in compiled.iterdir()) == before


def test_a_build_that_takes_too_long_is_stopped(compiled: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from nestforge.compiler.tensorrt import build_plan
    from nestforge.compiler.work.clock import Phases

    now = iter(range(0, 1000, 50))
    monkeypatch.setattr(build_plan.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(Phases.__init__, "__defaults__", (lambda: float(next(now)),))
    with_options(compiled, time_limit_s=60)
    with pytest.raises(BuildError, match="building passed the time limit of 60 s; raise time_limit_s of the profile's"):
        build_plans(compiled)
    assert world.calls == ["build"]


def test_a_graph_that_tensorrt_cannot_take_is_refused_before_it_is_asked(compiled: Path, world: World) -> None:
    graph = compiled / "ffn8-heads1.b2-s8.onnx"
    model = onnx.load(graph, load_external_data=False)
    model.graph.node.insert(0, onnx.helper.make_node("NonZero", [model.graph.input[1].name], ["places"], "where"))
    graph.write_bytes(model.SerializeToString())
    reseal(compiled)
    with pytest.raises(BuildError, match=r"^engine ffn8-heads1@b2-s8: TensorRT 10.3.0 cannot build its graph: NonZero"):
        build_plans(compiled)
    assert world.calls == []
    with pytest.raises(BuildError, match=r"^here: TensorRT 10 cannot build its graph: NonZero \(node 'where'\): INT64"):
        require_supported("here", model)


def test_a_damaged_bundle_is_not_built(compiled: Path, world: World) -> None:
    raw = bytearray((compiled / "weights.safetensors").read_bytes())
    raw[-1] ^= 1
    (compiled / "weights.safetensors").write_bytes(raw)
    with pytest.raises(BundleCorruptError, match=r"weights\.safetensors: sha256"):
        build_plans(compiled)


def test_a_bundle_for_another_backend_is_refused(compiled: Path, world: World) -> None:
    manifest = json.loads((compiled / "manifest.json").read_bytes())
    for engine in manifest["engines"]:
        engine["backend"] = "onnxruntime"
    (compiled / "manifest.json").write_text(json.dumps(manifest))
    reseal(compiled)
    with pytest.raises(BuildError, match="has no engines for TensorRT; compile with a profile whose backend is"):
        build_plans(compiled)


def test_without_tensorrt_one_line_says_so(compiled: Path) -> None:
    with pytest.raises(
        BundleIncompatibleError, match=r"needs TensorRT: \S+ is.*install nestforge\[tensorrt\]$"
    ) as raised:
        build_plans(compiled)
    assert "\n" not in str(raised.value)


def test_building_loads_no_torch() -> None:
    program = (
        "import sys; from nestforge.compiler.tensorrt import build_bundle, check_plan, graphs;"
        "print([name for name in ('torch', 'transformers', 'onnx_ir', 'tensorrt', 'cuda') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
