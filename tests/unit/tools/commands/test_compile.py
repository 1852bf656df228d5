"""``nestforge compile`` and ``nestforge export``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime
import pytest
from click.testing import CliRunner
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BuildError
from nestforge.profiles.job_file import load_job
from nestforge.runtime.summary import ShortNames
from nestforge.tools.cli import main
from nestforge.tools.commands.compile import build_command as command
from support.commands import error_of, json_of, nestforge, shown, usage_of
from support.fake_cuda import World
from support.fake_tensorrt import installed
from support.processes import needs_root, nobody
from support.sealing import reseal

GOLDEN = Path(__file__).parents[3] / "golden"
BUNDLE = str(GOLDEN / "bundle-tasks")
TEXT = ("--text", "the quick brown fox")


def said(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    return result.output


def test_inspect_lists_tasks_with_what_they_state() -> None:
    shown = said("inspect", BUNDLE)
    for word in ("quarter", "epsilon 0.3, reduction 4", "parity max abs"):
        assert word in shown
    data = json.loads(said("inspect", BUNDLE, "--json"))
    assert [(task["name"], task["bytes"]) for task in data["tasks"]] == [("both", 4260), ("quarter", 4260)]


def test_run_says_which_task_answered() -> None:
    assert json.loads(said("run", BUNDLE, *TEXT, "--task", "quarter", "--json"))["task"] == "quarter"
    assert json.loads(said("run", BUNDLE, *TEXT, "--json"))["task"] is None
    assert "no task 'quater' in bundle" in said("run", BUNDLE, *TEXT, "--task", "quater", code=1)


def test_verify_counts_tasks_and_bench_measures_requests_of_one() -> None:
    assert "2 tasks, every hash and seal as written" in said("verify", BUNDLE)
    assert "--task is for requests" in said("bench", BUNDLE, "--task", "quarter", code=2)
    assert "has no engine for task quarter" in said(
        "bench", BUNDLE, "--task", "quarter", "--concurrency", "1", "--submodel", "ffn24-coda.reduction1", code=1
    )


def test_a_task_is_merged_where_it_is_requested() -> None:
    merged = str(GOLDEN / "bundle-merged")
    assert "one that is merged into weights has engines of its own, 0.10 MB with all of them open" in said(
        "inspect", merged
    )
    data = json.loads(said("run", merged, *TEXT, "--task", "a", "--merge", "--json"))
    assert (data["engine"], data["task"]) == ("ffn32-heads2.merged@b1-s16", "a")
    assert "--merge is for --task" in said("run", merged, *TEXT, "--merge", code=2)
    assert "compile it with `--mergeable`" in said("run", BUNDLE, *TEXT, "--task", "both", "--merge", code=1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(("x",), "expected the name of a task and its folder"), (("a=b",), "Missing option '--against'")],
)
def test_add_task_needs_a_name_a_folder_and_the_base(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in said("add-task", BUNDLE, *arguments, code=2)


@needs_root
def test_a_bundle_that_cannot_be_written_takes_no_task_and_says_so_before_the_proof(tmp_path: Path) -> None:
    bundle = shutil.copytree(BUNDLE, tmp_path / "b")
    with nobody(bundle):
        shown = said("add-task", str(bundle), "new=anything", "--against", "nowhere", code=1)
    assert shown == (
        f"nestforge: error: {bundle}: cannot be written, so task new could not be saved; make it writable\n"
    )


def test_add_task_adds_an_adapter(tmp_path: Path) -> None:
    """And a bundle that takes none says what to do."""
    assert "its engines take no tasks; compile it with `--task`" in said(
        "add-task", str(GOLDEN / "bundle-ranges"), "a=b", "--against", "c", code=1
    )
    bert = GOLDEN / "peft" / "bert"
    bundle = str(tmp_path / "b")
    shape = ["--bucket", "1x8", "--levels", "ffn=1", "--no-measure", "--include", "budgets"]
    shape += ["--profile", "raspberry-pi-5"]
    said("compile", str(bert / "base"), *shape, "--task", f"b={bert / 'b'}", "--lora-rank", "4", "--output", bundle)
    shown = said("add-task", bundle, f"a={bert / 'a'}", "--against", str(bert / "base"))
    assert "rank 4, targets query, value" in shown
    assert "added a to" in shown
    assert "task a: there is another of this name" in said(
        "add-task", bundle, f"a={bert / 'a'}", "--against", str(bert / "base"), code=1
    )
    shutil.rmtree(bundle)


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


def test_a_saved_job_is_the_compile_that_it_was_saved_from(compiled: Any, tmp_path: Path) -> None:
    job, output = tmp_path / "job.yaml", tmp_path / "b.bundle"
    stated = [
        "--profile",
        compiled.profile,
        "--levels",
        "ffn=0.5,1",
        "--include",
        "budgets",
        "--output",
        tmp_path / "a",
    ]
    assert nestforge("compile", compiled.model, *stated, "--save", job).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]  # nothing is compiled
    assert json_of("inspect", job) == json_of("inspect", compiled.model, *stated[:4])
    assert json_of("plan", job) == json_of("plan", compiled.model, *stated[:6])
    assert json_of("inspect", job, "--levels", "ffn=1") != json_of("inspect", job)
    # What stands beside the file takes the place of its own.
    assert nestforge("compile", job, "--output", output, "--bucket", "1x4").exit_code == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["b.bundle", "job.yaml"]
    manifest = open_bundle(output).manifest
    assert {str(engine.bucket) for engine in manifest.engines} == {"1x4"}
    assert manifest.provenance.options.include == "budgets"
    assert manifest.provenance.profile["levels"] == {"ffn": [0.5, 1.0]}


@pytest.mark.parametrize(
    ("own", "beside", "expected"),
    [
        ("text: texts.txt", ["--data", "rows.npz"], {"text": None, "data": "rows.npz"}),
        ("data: rows.npz", ["--text", "texts.txt"], {"text": "texts.txt", "data": None}),
        ("pairs: ['1:16']", ["--exit-layers", "1"], {"pairs": [], "exits": [1]}),
        ("exits: [1]\ndimensions: [16]", ["--pair", "1:16"], {"pairs": ["1:16"], "exits": None, "dimensions": None}),
    ],
)
def test_an_option_beside_a_job_replaces_what_it_excludes(
    own: str, beside: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    job, saved = tmp_path / "JOB.YAML", tmp_path / "saved.yaml"
    job.write_text(f"model: m\n{own}\n")
    assert json_of("compile", job, *beside, "--save", saved) == {"job": str(saved)}
    found = load_job(saved) | {name: None for name in expected if name not in load_job(saved)}
    assert {name: found[name] for name in expected} == expected


def test_a_job_that_is_none_is_one_line(compiled: Any, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"model: {compiled.model}\nprecison: [fp32]\n")
    assert error_of("compile", job) == f"{job}: no option 'precison'; did you mean 'precisions'?"
    assert all("cannot be read" in error_of(each, tmp_path / "n.yaml") for each in ("compile", "inspect", "plan"))
    stated = ("--data", "rows.npz", "--text", "a")
    assert "at most one of --text and --data" in usage_of("compile", compiled.model, *stated)
    assert f"{job}: exists" in error_of("compile", compiled.model, "--save", job)


def test_one_submodel_as_an_onnx_file(compiled: Any, tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    says = shown("export", compiled.bundle, "--format", "onnx", "-o", path, "--submodel", "L").splitlines()
    assert says[0].split(maxsplit=1) == ["submodel", "L, fp32, 1x8"]
    assert says[1].endswith("equal to the bit")
    assert says[-1] == f"wrote {path}, {path.stat().st_size / 1e6:.1f} MB"
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    manifest = open_bundle(compiled.bundle).manifest
    assert [one.name for one in session.get_inputs()] == [spec.name for spec in manifest.inputs]
    assert session.get_modelmeta().custom_metadata_map["nestforge.submodel"] == manifest.submodel("L").id
    line = error_of("export", compiled.bundle, "--format", "onnx", "-o", path)
    assert line == f"{path}: exists already; choose another file"


def test_json_and_usage(compiled: Any, tmp_path: Path) -> None:
    data = json_of("export", compiled.bundle, "--format", "onnx", "-o", tmp_path / "a.onnx", "--bucket", "1x8")
    assert (data["files"], data["precision"]) == ([str(tmp_path / "a.onnx")], "fp32")
    assert data["parity"]["max_abs"] < 1e-5
    assert "--output" in usage_of("export", compiled.bundle, "--format", "onnx")
    assert "tflite" in usage_of("export", compiled.bundle, "--format", "tflite", "-o", "x")
    failed = nestforge("export", compiled.bundle, "--format", "onnx", "-o", tmp_path / "b.onnx", "--bucket", "4x8")
    assert "has 1x8; got 4x8" in failed.stderr.splitlines()[-1]
    assert not (tmp_path / "b.onnx").exists()


def test_a_repository_for_triton(compiled: Any, tmp_path: Path) -> None:
    models = tmp_path / "models"
    says = shown("export", compiled.bundle, "--format", "triton", "-o", models)
    assert says == f"wrote {models} with model tiny; tritonserver --model-repository {models}\n"
    assert (models / "tiny" / "1" / "bundle" / "manifest.json").samefile(compiled.bundle / "manifest.json")
    assert json_of("export", compiled.bundle, "--format", "triton", "-o", tmp_path / "again")["model"] == "tiny"
    assert "exists already" in error_of("export", compiled.bundle, "--format", "triton", "-o", models)
    line = usage_of("export", compiled.bundle, "--format", "triton", "-o", tmp_path / "c", "--submodel", "L")
    assert "--submodel, --bucket and --task are for onnx and ortpackage" in line


def test_a_package_for_onnx_runtime(compiled: Any, tmp_path: Path) -> None:
    package = tmp_path / "my.ortpackage"
    asked = ("export", compiled.bundle, "--format", "ortpackage", "-o")
    says = shown(*asked, package, "--submodel", "L", "--bucket", "1x8")
    size = sum(path.stat().st_size for path in package.rglob("*") if path.is_file()) / 1e6
    assert says == f"wrote {package} with L (laptop-x86), {size:.1f} MB; ONNX Runtime opened each on the processor\n"
    twice = usage_of("export", compiled.bundle, compiled.bundle, "--format", "onnx", "-o", tmp_path / "two")
    assert "onnx is of one bundle; ortpackage takes several" in twice
    data = json_of(*asked, tmp_path / "all")
    assert len(data["components"]) == len(open_bundle(compiled.bundle).manifest.submodels)
