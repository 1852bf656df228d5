"""Each command on a tiny bundle: what it prints, as text and as JSON, and how it refuses."""

import json
import re
import shutil
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import ParityOutput
from nestforge.bundle.manifest import SCHEMA_VERSION
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler import compile as compile_module
from nestforge.compiler import job, mix_n_match
from nestforge.compiler import verify as verify_module
from nestforge.compiler.verify import EngineVerdict, VerifyReport
from nestforge.profiles import measure_rates
from nestforge.profiles.device_profile import Rates, profile_data
from nestforge.profiles.load_profile import dump_profile, load_profile
from nestforge.profiles.precision import Precision
from nestforge.runtime.engines.measure import LatencyStats, MemoryUse
from nestforge.runtime.engines.onnxruntime.mapped_cache import is_mapped
from nestforge.runtime.engines.runner import runner_for
from nestforge.tools import bundle_bench
from support.commands import error_of, json_of, nestforge, shown
from support.cost_eff_models import save_tiny as save_tiny_exits


def test_doctor_tells_what_is_installed() -> None:
    data = json_of("doctor")
    assert data["builds"] is True
    assert data["compile_packages"]["torch"]
    backends = {backend["name"]: backend for backend in data["backends"]}
    assert backends["onnxruntime"]["runs"] is True
    assert "CPUExecutionProvider" in backends["onnxruntime"]["remark"]
    assert backends["tensorrt"]["runs"] is False
    assert data["profiles"][0] == "host-cpu"
    assert nestforge("doctor").stdout.endswith("compiles here: yes\n")


def test_inspect_a_model(compiled: Any) -> None:
    arguments = ["inspect", compiled.model, "--profile", compiled.profile]
    data = json_of(*arguments, "--bucket", "1x8", "--bucket", "2x16", "--levels", "ffn=0.5,1")
    assert data["family"] == "bert"
    assert [level["submodel"] for level in data["levels"]] == ["ffn32-heads4", "ffn64-heads4"]
    half, full = data["levels"]
    # Per layer 32 neurons fewer: a row, a bias and a column each.
    assert full["parameters"] - half["parameters"] == 3 * 32 * (32 + 1 + 32)
    assert set(full["flops"]) == {"b1-s8", "b2-s16"}
    assert full["flops"]["b2-s16"] > 4 * full["flops"]["b1-s8"]
    lines = nestforge(*arguments, "--levels", "ffn=0.4,1").stdout.splitlines()
    assert lines[-1] == "40%: ffn 25.6 of 64 rounded to 24 (a multiple of 8)"


def test_inspect_shows_the_levels_that_plan_has(compiled: Any, tmp_path: Path) -> None:
    wide = tmp_path / "wide.yaml"
    wide.write_text(compiled.profile.read_text().replace("width_multiple: 8", "width_multiple: 64"))
    for profile, multiple in ((compiled.profile, 8), (wide, 64)):
        seen = json_of("inspect", compiled.model, "--profile", profile)
        planned = json_of("plan", compiled.model, "--profile", profile)
        assert seen["width_multiple"] == multiple
        assert {level["submodel"] for level in seen["levels"]} <= {
            candidate["id"] for candidate in planned["candidates"]
        }
        assert list(seen["levels"][0]["flops"]) == ["b1-s8"]  # the profile's bucket


def test_exits_are_chosen_alike_by_inspect_and_plan(compiled: Any, tmp_path: Path) -> None:
    model = save_tiny_exits(tmp_path / "exits")
    options = ["--profile", compiled.profile, "--bucket", "1x8", "--exit-layers", "1"]
    seen, planned = (json_of(command, model, *options) for command in ("inspect", "plan"))
    assert [level["label"] for level in seen["levels"]] == ["depth1", "depth4"], "the last exit is always one"
    assert [candidate["labels"] for candidate in planned["candidates"]] == [["depth1"], ["depth4"]]
    assert "no exit after layer 2; it has 1, 3, 4" in error_of("plan", model, *options[:-1], "2")


def test_plan_takes_pairs_of_layers_and_dimensions(compiled: Any) -> None:
    options = ["--profile", compiled.profile, "--bucket", "1x8", "--pair", "1:4"]
    ids = {candidate["id"] for candidate in json_of("plan", compiled.model, *options)["candidates"]}
    assert {name.partition("-")[0] for name in ids} == {"depth1", "depth3"}
    assert "`pairs`" not in error_of("plan", compiled.model, *options[:-1], "9:4")


def test_inspect_a_bundle(compiled: Any) -> None:
    data = json_of("inspect", compiled.bundle)
    assert data["kind"] == "bundle"
    assert data["manifest"]["schema_version"] == SCHEMA_VERSION
    assert data["build"]["manifest_sha256"]
    text = nestforge("inspect", compiled.bundle).stdout
    for name in (entry["id"] for entry in data["manifest"]["submodels"]):
        assert name in text
    assert "ranked by taylor" in text
    for entry in data["manifest"]["files"]:
        assert re.search(rf"^{re.escape(entry['path'])} +{entry['bytes']:,}$", text, re.MULTILINE)
        assert re.fullmatch("[0-9a-f]{64}", entry["sha256"])
    for option in (["--bucket", "1x8"], ["--profile", "host-cpu"], ["--levels", "ffn=1"]):
        assert nestforge("inspect", compiled.bundle, *option).exit_code == 2


def test_plan_lists_chosen_and_rejected(compiled: Any) -> None:
    data = json_of("plan", compiled.model, "--profile", compiled.profile, "--bucket", "1x16")
    assert data["budget_bucket"] == {"batch": 1, "sequence": 16}
    ids = [candidate["id"] for candidate in data["candidates"]]
    for budget in data["budgets"]:
        assert {budget["submodel"], *(rejection["submodel"] for rejection in budget["rejected"])} <= set(ids)
    text = nestforge("plan", compiled.model, "--profile", compiled.profile).stdout
    for budget in data["budgets"]:
        assert f"\nbudget {budget['name']} (" in text


def test_plan_and_compile_refuse_in_one_line(compiled: Any, tmp_path: Path) -> None:
    assert "did you mean 'laptop-x86'?" in error_of("plan", compiled.model, "--profile", "laptop-x68")
    assert "did you mean 'ffn'?" in error_of("plan", compiled.model, "--profile", compiled.profile, "--levels", "fnn=1")
    assert error_of("compile", tmp_path / "none", "--output", tmp_path / "b").startswith(
        f"{tmp_path / 'none'}: no such"
    )
    existing = error_of("compile", compiled.model, "--profile", compiled.profile, "--output", compiled.bundle)
    assert existing.startswith(f"{compiled.bundle}: exists already")
    assert nestforge("compile").exit_code == 2
    for option, said in (("--levels", ["ffn=0.5,1", "ffn=0.25,1"]), ("--variant", ["mixing=dense", "mixing=folded"])):
        twice = nestforge("plan", compiled.model, option, said[0], option, said[1])
        name = said[0].partition("=")[0]
        assert twice.exit_code == 2
        assert f"Invalid value for '{option}': {name} is given 2 times; say it once" in twice.stderr


def test_compile_prints_the_submodels_and_keeps_stdout_for_json(compiled: Any, tmp_path: Path) -> None:
    output = tmp_path / "again.bundle"
    arguments = ["compile", compiled.model, "--profile", compiled.profile, "--output", output, "--bucket", "1x8"]
    levels = ["--levels", "ffn=0.5,1", "--levels", "heads=0.5,1", "--submodel", "ffn16-heads1"]
    data = json_of(*arguments, *levels)
    ids = {entry["id"] for entry in data["manifest"]["submodels"]}
    assert {"ffn16-heads1", "ffn32-heads2", "ffn64-heads4"} <= ids
    assert data["manifest"]["ranking"]["method"] == "magnitude"
    assert data["build"]["command"][0] == "nestforge"
    assert json_of("inspect", output)["manifest"] == data["manifest"]


def test_compile_states_what_was_rounded(compiled: Any, tmp_path: Path) -> None:
    arguments = ["compile", compiled.model, "--profile", compiled.profile, "--include", "budgets"]
    stdout = nestforge(*arguments, "--levels", "ffn=0.4,1", "--output", tmp_path / "rounded.bundle").stdout
    assert "\nnote: 40%: ffn 25.6 of 64 rounded to 24 (a multiple of 8)\n" in stdout


def test_an_interrupted_compile_says_how_to_go_on(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_module, "load_universal", interrupted)
    output = tmp_path / "cut.bundle"
    result = nestforge("compile", compiled.model, "--profile", compiled.profile, "--output", output)
    assert (result.exit_code, result.stdout) == (130, "")
    takes, said = result.stderr.splitlines()
    assert takes.startswith("takes about ")
    assert said == "nestforge: interrupted: the same command goes on where this one was"
    assert not output.exists()
    assert output.with_name("cut.bundle.partial").is_dir()


def test_verify(compiled: Any, tmp_path: Path) -> None:
    data = json_of("verify", compiled.bundle)
    assert data["engines"] == []
    assert data["files"] == len(open_bundle(compiled.bundle).manifest.files)
    verdicts = json_of("verify", compiled.bundle, "--against", compiled.model)["engines"]
    assert [verdict.get("problem") for verdict in verdicts] == [None] * len(verdicts)
    assert "equal" in nestforge("verify", compiled.bundle, "--against", compiled.model).stdout

    damaged = tmp_path / "damaged.bundle"
    shutil.copytree(compiled.bundle, damaged)
    weights = damaged / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    assert error_of("verify", damaged).startswith(f"{weights}: sha256 ")


def test_verify_shows_engines_whose_figures_are_not_finite(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = (ParityOutput("logits", inf, inf, -1.0, inf, 0.0, 0.0),)
    verdicts = (EngineVerdict("a", broken, "output logits differs"), EngineVerdict("b", (), "no answer"))
    report = VerifyReport("x", 1, 2, "model", verdicts)
    monkeypatch.setattr(verify_module, "verify_bundle", lambda *_: report)
    arguments = ["verify", compiled.bundle, "--against", compiled.model]
    text = nestforge(*arguments)
    assert text.exit_code == 1
    assert re.search(r"^a +differs +inf +inf +-1\.0000000$", text.stdout, re.MULTILINE)
    assert re.search(r"^b +differs +- +- +-$", text.stdout, re.MULTILINE)
    as_json = nestforge(*arguments, "--json")
    assert as_json.exit_code == 1
    (figures,), none = [engine["outputs"] for engine in json.loads(as_json.stdout)["engines"]]
    assert none == []
    finite = {"name": "logits", "min_cosine": -1.0, "float32_max_abs": 0.0, "float32_rms": 0.0}
    assert figures == {**finite, **dict.fromkeys(("max_abs", "max_rel", "max_rms"))}


def test_run_on_text(compiled: Any) -> None:
    data = json_of("run", compiled.bundle, "--text", "the quick fox")
    assert data["submodel"] == "ffn64-heads4"
    assert data["padding"] == {"given": {"batch": 1, "sequence": 5}, "filled": {"batch": 1, "sequence": 8}}
    assert data["outputs"]["last_hidden_state"]["shape"] == [1, 5, 32]
    assert len(data["outputs"]["sentence_embedding"]["first"]) == 6
    short = json_of("run", compiled.bundle, "--text", "the quick fox", "--dimensions", "4")
    assert (short["dimensions"], short["outputs"]["sentence_embedding"]["shape"]) == (4, [1, 4])
    small = json_of("run", compiled.bundle, "--text", "the quick fox", "--budget", "small")
    assert small["reason"].startswith("budget small: ")
    assert small["submodel"] != data["submodel"]
    lines = nestforge("run", compiled.bundle, "--text", "the quick fox", "--submodel", "XL").stdout.splitlines()
    assert lines[:2] == ["submodel  XL", "because   submodel XL requested"]


def test_run_shares_weights_unless_asked(compiled: Any) -> None:
    text = ["run", compiled.bundle, "--text", "the quick fox"]
    assert json_of(*text)["residency"] == "shared"
    assert json_of(*text, "--residency", "packed")["residency"] == "packed"
    assert json_of(*text, "--residency", "auto")["residency"] == "packed"


def test_run_truncates_only_when_asked(compiled: Any) -> None:
    text = ["run", compiled.bundle, "--text", "the quick brown fox jumps over the lazy dog"]
    assert "truncate" in error_of(*text)
    assert json_of(*text, "--truncate")["truncated"] == [0]
    assert "\ntruncated  text 0\n" in nestforge(*text, "--truncate").stdout
    assert "truncated" not in nestforge(*text[:2], "--text", "the fox", "--truncate").stdout
    assert nestforge("run", compiled.bundle, "--inputs", "x.npz", "--truncate").exit_code == 2


def test_run_on_arrays_writes_all_outputs(compiled: Any, tmp_path: Path) -> None:
    names = [spec.name for spec in open_bundle(compiled.bundle).manifest.inputs]
    np.savez(tmp_path / "in.npz", **{name: np.ones((1, 8), np.int64) for name in names})
    data = json_of("run", compiled.bundle, "--inputs", tmp_path / "in.npz", "--output", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as arrays:
        assert {name: list(arrays[name].shape) for name in arrays} == {
            name: output["shape"] for name, output in data["outputs"].items()
        }
        assert arrays["sentence_embedding"].ravel()[:6].tolist() == data["outputs"]["sentence_embedding"]["first"]
    again = error_of("run", compiled.bundle, "--inputs", tmp_path / "in.npz", "--output", tmp_path / "out.npz")
    assert again == f"{tmp_path / 'out.npz'}: exists already; choose another file or `--overwrite`"


def test_run_refuses(compiled: Any, tmp_path: Path) -> None:
    text = ["run", compiled.bundle, "--text", "a"]
    assert "no submodel answers 1x3 with `--latency-ms` <= 1e-06" in error_of(*text, "--latency-ms", "0.000001")
    assert error_of(*text, "--budget", "smal") == "no budget 'smal' in this bundle; did you mean 'small'?"
    for arguments in (text[:2], [*text, "--inputs", "x.npz"], [*text, "--budget", "a", "--latency-ms", "1"]):
        assert nestforge(*arguments).exit_code == 2
    assert nestforge(*text, "--latency-ms", "0").exit_code == 2


def test_bench_puts_predicted_beside_measured(compiled: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bundle_bench, "measure", lambda *_, **__: LatencyStats(20, 2.0, 3.0, 4.0, 0.1))
    monkeypatch.setattr(bundle_bench, "memory_use", lambda *_: MemoryUse(1_500_000, 2_500_000))
    bundle = open_bundle(compiled.bundle)
    data = json_of("bench", compiled.bundle)
    assert len(data["engines"]) == 3 * len(bundle.manifest.engines)
    assert all("predicted_ms" not in row for row in data["engines"])  # compiled for another device than this one

    monkeypatch.setattr(bundle_bench, "is_this_host", lambda profile: profile.buckets == (Bucket(1, 8),))
    rows = {(row["engine"], row["residency"]): row for row in json_of("bench", compiled.bundle)["engines"]}
    predicted = {latency.engine: latency.largest.predicted_ms for latency in bundle.build.latencies}
    for (engine, residency), row in rows.items():
        assert row.get("predicted_ms") == (predicted[engine] if residency == "packed" else None)
        assert row.get("error") == (predicted[engine] / 2.0 - 1 if residency == "packed" else None)
    text = nestforge("bench", compiled.bundle, "--submodel", "XL").stdout
    assert re.search(r" packed +2\.00 +3\.00 +4\.00 .* 1\.5 +2\.5\n", text)
    assert "error of the predictions: median " in text
    assert "\na few of these rungs were measured at compile time to correct the predictions" in text


def test_bench_leaves_the_cache_of_mapped_engines_as_it_was(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bundle_bench, "measure", lambda *_, **__: LatencyStats(20, 2.0, 3.0, 4.0, 0.1))
    monkeypatch.setattr(bundle_bench, "memory_use", lambda *_: MemoryUse(1_500_000, 2_500_000))
    bundle = open_bundle(compiled.bundle)
    used = bundle.manifest.engines[0]
    with runner_for(bundle, used, "mapped", 1):
        pass
    assert nestforge("bench", compiled.bundle).exit_code == 0
    assert [is_mapped(bundle, engine) for engine in bundle.manifest.engines] == [
        engine == used for engine in bundle.manifest.engines
    ]


def test_profile_is_what_the_option_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure_rates, "measure_host_rates", lambda _cores: Rates(10.0, 5.0, 5.0, 5.0, 1.0))
    path = tmp_path / "my.yaml"
    data = json_of("profile", "--force", "--output", path)
    assert data["name"] == "host-cpu"
    assert profile_data(load_profile(path)) == data
    assert error_of("profile", "--output", path) == f"{path}: exists already; choose another file or `--overwrite`"


def test_run_within_a_deadline(compiled: Any) -> None:
    text = ["run", compiled.bundle, "--text", "the quick fox"]
    data = json_of(*text, "--deadline-ms", "1e6")
    assert data["submodel"] == "ffn64-heads4"
    assert re.fullmatch(
        r"predicted \S+ ms, expected in \S+ ms <= 1e\+06 ms left of 1e\+06, nothing in flight", data["reason"]
    )
    assert error_of(*text, "--deadline-ms", "1e-6").startswith(
        "no submodel answers 1x5 with `--deadline-ms` <= 1e-06 ("
    )
    assert nestforge(*text, "--deadline-ms", "5", "--latency-ms", "5").exit_code == 2
    assert data["best"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "LONG", "--text", "hello"),
        ("inspect", "LONG"),
        ("verify", "LONG"),
        ("bench", "LONG"),
        ("plan", "LONG"),
        ("plan", "BUNDLE", "--profile", "LONG"),
        ("compile", "LONG", "--output", "out"),
        ("run", "BUNDLE", "--text", "hello", "--output", "LONG"),
        ("run", "BUNDLE", "--text", "hello", "--output", "/proc/x/y"),
        ("run", "BUNDLE", "--inputs", "LONG"),
        ("run", "BUNDLE", "--inputs", "/dev/full"),
        ("run", "BUNDLE", "--text", "hello", "--budget", "LONG"),
        ("run", "BUNDLE", "--text", "hello", "--submodel", "LONG"),
        ("profile", "--output", "/proc/x/y"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_names_that_no_file_has_are_one_short_line(compiled: Any, arguments: tuple[str, ...]) -> None:
    given = {"LONG": "x" * 5000, "BUNDLE": str(compiled.bundle)}
    assert len(error_of(*(given.get(argument, argument) for argument in arguments))) < 3000


def profile_with(folder: Path, profile: Path, *precisions: Precision) -> Path:
    path = folder / "precise.yaml"
    path.write_text(dump_profile(replace(load_profile(profile), precisions=precisions)))
    return path


@pytest.mark.parametrize(("precisions", "line"), [("int8", "int8"), ("fp32,int8", "fp32, int8")])
def test_a_plan_names_its_precisions(compiled: Any, precisions: str, line: str) -> None:
    arguments = ["plan", compiled.model, "--profile", compiled.profile, "--precision", precisions]
    table = shown(*arguments).splitlines()
    assert table[2].split(maxsplit=1) == ["precision", line]
    chosen = {budget["submodel"] for budget in json_of(*arguments)["budgets"]}
    unused = "," in precisions and not any(submodel.endswith(".int8") for submodel in chosen)
    assert ("note: int8: no budget chose it; `--include levels` builds it all the same" in table) == unused


def test_inspect_counts_weights_in_the_precision_of_the_profile(compiled: Any, tmp_path: Path) -> None:
    plain = json_of("inspect", compiled.model, "--profile", compiled.profile)
    profile = profile_with(tmp_path, compiled.profile, "int8")
    narrow = json_of("inspect", compiled.model, "--profile", profile)
    planned = json_of("plan", compiled.model, "--profile", profile)
    bytes_of = {candidate["id"]: candidate["weight_bytes"] for candidate in planned["candidates"]}
    assert (plain["precisions"], narrow["precisions"]) == (["fp32"], ["int8"])
    assert {level["submodel"]: level["weight_bytes"] for level in narrow["levels"]}.items() <= bytes_of.items()
    assert narrow["levels"][-1]["weight_bytes"] < 0.5 * plain["levels"][-1]["weight_bytes"]
    text = shown("inspect", compiled.model, "--profile", profile)
    assert [line.split() for line in text.splitlines() if line.startswith("precision")] == [["precision", "int8"]]


def test_inspect_shows_levels_in_the_highest_of_several(compiled: Any, tmp_path: Path) -> None:
    profile = profile_with(tmp_path, compiled.profile, "int8", "fp32")
    found = json_of("inspect", compiled.model, "--profile", profile)
    assert found["precisions"] == ["int8", "fp32"]
    assert not any("int8" in level["submodel"] for level in found["levels"])


@pytest.mark.parametrize("precisions", [("int8",), ("int8", "fp16")])
def test_mixnmatch_plans_in_the_highest_precision(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precisions: tuple[Precision, ...]
) -> None:
    planned: list[Any] = []

    class Planned(Exception):
        """The rest is PyTorch's in float32, whatever the precision."""

    def stop(source: Any) -> None:
        planned.append(source)
        raise Planned

    monkeypatch.setattr(mix_n_match, "read_corpus", stop)
    made, make_plan = [], job.make_plan
    monkeypatch.setattr(job, "make_plan", lambda *a, **k: made.append(make_plan(*a, **k)) or made[-1])
    profile = profile_with(tmp_path, compiled.profile, *precisions)
    arguments = ["mixnmatch", compiled.model, "--text", "t", "--budget", "parameters<=80%", "--profile", profile]
    assert isinstance(nestforge(*arguments).exception, Planned)
    assert {c.precision for plan in made for c in plan.candidates} == {precisions[-1]}
    assert not any(precision in c.id for plan in made for c in plan.candidates for precision in precisions)
