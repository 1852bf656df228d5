"""Bundles for TensorRT: compiled without it, finished and run on a device that tests/support/fake_tensorrt.py plays.

No plan is really built or run: that these journeys work on a GPU is not shown here.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from click.testing import CliRunner, Result
from nestforge.tools.cli import main
from support.fake_cuda import World
from support.fake_tensorrt import host_with_gpu
from support.sealing import reseal
from support.tiny_compile import save_tiniest
from support.tiny_models import add_pooling

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
HERE = "tensorrt is not installed; install nestforge[tensorrt]"
ON_JETSON = ["--profile", "jetson-orin-nano-8gb", "--bucket", "1x16", "--levels", "ffn=0.5,1"]
SMALL, LARGE = "ffn64-heads2", "ffn128-heads2"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def out(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def error(*arguments: object) -> str:
    """The one line of a command that fails."""
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("nestforge: ")]
    return line.removeprefix("nestforge: error: ")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RoBERTa counts tokens in whole numbers, which TensorRT does not: its graphs are rewritten."""
    folder = save_tiniest(tmp_path_factory.mktemp("model") / "tiny", "roberta", intermediate_size=128)
    add_pooling(folder)
    return folder


@pytest.fixture(scope="module")
def emitted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("emitted") / "jetson.bundle"
    lines = out("compile", model, *ON_JETSON, "--emit-only", "--output", bundle).splitlines()
    assert lines[-2:] == [f"wrote {bundle}", "on the device: nestforge build jetson.bundle"]
    return bundle


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with host_with_gpu(tmp_path / "cache") as found:
        yield found


@pytest.fixture
def bundle(emitted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(emitted, tmp_path / "carried.bundle"))


def test_graphs_are_proven_here_and_say_how_plans_are_built(emitted: Path, model: Path) -> None:
    found = nestforge.open_bundle(emitted, check="full")
    engines = found.manifest.engines
    assert [(engine.submodel, engine.backend, engine.emitted) for engine in engines] == [
        (SMALL, "tensorrt", "sliced"),
        (LARGE, "tensorrt", "sliced"),
    ]
    assert {path.name for path in emitted.glob("*.plan")} == set()

    lines = out("inspect", emitted).splitlines()
    assert "2 of 2 graphs have no plan yet: run `nestforge build` on the device" in lines
    assert json.loads(out("inspect", emitted, "--json"))["plans"] == []
    verdict = json.loads(out("verify", emitted, "--against", model, "--json"))
    assert [(engine["engine"], engine.get("problem")) for engine in verdict["engines"]] == [
        (e.id, None) for e in engines
    ]


def test_without_tensorrt_every_command_says_so_in_one_line(emitted: Path, model: Path, tmp_path: Path) -> None:
    assert error("build", emitted) == f"bundle {emitted}: needs TensorRT: {HERE}"
    cannot = f"bundle {emitted}: this host cannot run its engines: {HERE}"
    assert error("run", emitted, "--text", "hello") == cannot
    assert error("bench", emitted) == cannot
    assert error("compile", model, *ON_JETSON, "--output", tmp_path / "x") == (
        f"profile jetson-orin-nano-8gb: plans for TensorRT cannot be built here: {HERE}; or compile with "
        "`--emit-only` and run `nestforge build` on the device"
    )
    assert not (tmp_path / "x").exists()


def test_the_device_finishes_the_bundle_and_answers(bundle: Path, world: World) -> None:
    assert out("build", bundle).splitlines()[-1] == "plans for Fake GPU (compute capability 8.7, TensorRT 10.3.0)"
    assert "2 plans, every hash and seal as written" in out("verify", bundle)
    assert [plan["was_kept"] for plan in json.loads(out("build", bundle, "--json"))] == [True, True]
    listed = json.loads(out("inspect", bundle, "--json"))["plans"]
    assert [(plan["graph"], plan["gpu"]["name"]) for plan in listed] == [
        (f"{LARGE}.b1-s16.onnx", "Fake GPU"),
        (f"{SMALL}.b1-s16.onnx", "Fake GPU"),
    ]
    lines = out("inspect", bundle).splitlines()
    assert sum(line.startswith(LARGE) and "Fake GPU" in line for line in lines) == 1
    assert not any("no plan yet" in line for line in lines)

    world.calls.clear()
    answer = json.loads(out("run", bundle, "--text", "hello world", "--submodel", SMALL, "--json"))
    assert (answer["submodel"], answer["residency"]) == (SMALL, "packed")
    assert world.calls == ["open", "refit", "context", "run", "graph", "run"]  # first on zeros, then the request
    (tensorrt,) = [each for each in json.loads(out("doctor", "--json"))["backends"] if each["name"] == "tensorrt"]
    assert (tensorrt["runs"], tensorrt["remark"]) == (
        True,
        "Fake GPU (compute capability 8.7, TensorRT 10.3.0)",
    )


def test_a_compile_on_the_device_builds_plans_at_once(model: Path, world: World, tmp_path: Path) -> None:
    bundle = tmp_path / "device.bundle"
    arguments = [*ON_JETSON, "--budget", "parameters<=100%", "--include", "budgets"]
    assert out("compile", model, *arguments, "--output", bundle).splitlines()[-1] == f"wrote {bundle}"
    assert [plan["graph"] for plan in json.loads((bundle / "plans.json").read_bytes())["plans"]] == [
        f"{LARGE}.b1-s16.onnx"
    ]


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


BROKEN: dict[str, tuple[Callable[[Path, World, pytest.MonkeyPatch], object], str]] = {
    "another GPU": (
        lambda b, w, m: setattr(w, "gpu", "Other GPU"),
        "built for Fake GPU (8.7), this host has Other GPU (8.7); run `nestforge build BUNDLE` on this device",
    ),
    "a flipped byte": (
        lambda b, w, m: [flip(path) for path in b.glob("*.plan")],
        "; remove it and run `nestforge build BUNDLE` on this device",
    ),
    "a plan that somebody else built": (
        lambda b, w, m: m.setenv("XDG_CACHE_HOME", str(b.parent / "elsewhere")),
        "was not built with this host's plan key, and a plan is native code; run `nestforge build BUNDLE`",
    ),
    "a list of plans that was edited": (
        lambda b, w, m: (b / "plans.json").write_text((b / "plans.json").read_text().replace("4096", "0")),
        "its seal is not that of its content; remove it and build the plans again",
    ),
    "a list of plans that is none": (
        lambda b, w, m: (b / "plans.json").write_text("{}"),
        "schema_version 'None', expected 1; use the nestforge release that wrote it, or remove it and build the plans",
    ),
    "no plan": (
        lambda b, w, m: (b / "plans.json").unlink(),
        "has no plan yet; run `nestforge build BUNDLE` on this device",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_run_says_why_and_is_not_opened(
    case: str, bundle: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    out("build", bundle)
    world.calls.clear()
    damage, message = BROKEN[case]
    damage(bundle, world, monkeypatch)
    said = error("run", bundle, "--text", "hello", "--submodel", SMALL).replace(f"build {bundle}", "build BUNDLE")
    assert message in said, said
    assert world.calls == []


def as_plans(golden: str, folder: Path) -> Path:
    """A bundle of graphs that an earlier compile left, for TensorRT."""
    bundle = Path(shutil.copytree(GOLDEN / golden, folder / golden))
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    for engine in manifest["engines"]:
        engine["backend"] = "tensorrt"
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    reseal(bundle)
    return bundle


@pytest.mark.parametrize(
    ("golden", "asked", "parts"),
    [("bundle-exits", {"exits": 0.5}, 6), ("bundle-experts", {"routing": True}, 3)],
    ids=["exits", "experts"],
)
def test_chains_and_decisions_are_those_of_the_graphs(
    golden: str, asked: dict[str, Any], parts: int, tmp_path: Path, world: World
) -> None:
    bundle = as_plans(golden, tmp_path)
    assert len(json.loads(out("build", bundle, "--json"))) == parts
    with nestforge.load(GOLDEN / golden, residency="shared") as graphs, nestforge.load(bundle) as plans:
        inputs = {spec.name: np.ones((1, 16), np.int64) for spec in graphs.bundle.manifest.inputs}
        expected, found = graphs(inputs, **asked), plans(inputs, **asked)
    assert found.residency == "packed"
    assert (found.exits is None) == (golden == "bundle-experts")
    for name, array in expected.outputs.items():
        np.testing.assert_allclose(found.outputs[name], array, atol=1e-5, rtol=1e-4)
    for name, array in (expected.routing or {}).items():
        np.testing.assert_array_equal(found.routing[name], array)


def test_two_ranges_are_two_plans_of_each_submodel(model: Path, world: World, tmp_path: Path) -> None:
    """Where one choice of kernels is wrong for both ends: a text runs at its own length, by the range that holds it."""
    bundle = tmp_path / "ranges.bundle"
    ranges = ["--bucket", "1x1..8", "--bucket", "1x9..16"]
    out("compile", model, *ON_JETSON[:2], *ranges, *ON_JETSON[4:], "--emit-only", "--output", bundle)
    built = json.loads(out("build", bundle, "--json"))
    assert sorted(plan["engine"] for plan in built) == [
        f"{submodel}@{bucket}" for submodel in (LARGE, SMALL) for bucket in ("b1-s1_8", "b1-s9_16")
    ]
    for text, bucket in (("hello", "b1-s1_8"), (" ".join(["hello"] * 12), "b1-s9_16")):
        answer = json.loads(out("run", bundle, "--text", text, "--submodel", SMALL, "--json"))
        assert (answer["engine"], answer["padding"]) == (f"{SMALL}@{bucket}", None)
        assert "graph" not in world.calls


def test_a_language_model_writes_text_from_its_plans(tmp_path: Path) -> None:
    """The bundle of another release of nestforge, since a compile of one takes long."""
    bundle = Path(shutil.copytree(GOLDEN / "bundle-tensorrt", tmp_path / "text.bundle"))
    prompt = ("generate", bundle, "--prompt", "hello world")
    with host_with_gpu(tmp_path / "cache", version="10.15.0") as world:
        assert error(*prompt).endswith(f"has no plan yet; run `nestforge build {bundle}` on this device")
        assert "6 of 6 graphs have no plan yet: run `nestforge build` on the device" in out("inspect", bundle)
        out("build", bundle)
        lines = out("inspect", bundle).splitlines()
        assert sum("cached" in line and "Fake GPU" in line for line in lines) == 4
        assert "6 plans, every hash and seal as written" in out("verify", bundle)
        world.calls.clear()
        written = json.loads(out(*prompt, "--max-tokens", "30", "--json"))
        assert len(written["rows"][0]["tokens"]) == 30
        assert world.calls.count("open") == 2, "of both capacities"
        drafted = json.loads(out(*prompt, "--max-tokens", "30", "--draft", "ffn16-heads2", "--json"))
        assert drafted["rows"][0]["tokens"] == written["rows"][0]["tokens"]
        paced = json.loads(out(*prompt, "--max-tokens", "5", "--tokens-per-second", "0.01", "--json"))
        assert paced["rows"][0]["tokens"] == written["rows"][0]["tokens"][:5]
        refused = error(*prompt, "--capacity", "49")
        assert refused == "capacity: expected at most 48, the positions of this model, got 49"
        (bundle / "plans.json").unlink()
        assert "has no plan yet" in error(*prompt)
    assert error(*prompt) == f"bundle {bundle}: this host cannot run its engines: {HERE}"
