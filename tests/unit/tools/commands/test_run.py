"""``nestforge run`` of several texts, and with a limit in time: runs, first runs, and limits that were missed."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.runtime import load
from nestforge.runtime.answer import Answer, Timings
from nestforge.runtime.inputs.files import read_npz
from nestforge.tools import bundle_bench
from nestforge.tools.commands.run import Best, best_answers
from support.commands import error_of, json_of, nestforge, shown, usage_of
from support.exit_bundles import every_exit, requests, write_exits_bundle
from support.fake_gpu import host_provider
from support.sealing import edit_manifest, edit_sealed

TEXTS = ("--text", "the quick fox", "--text", "the fox")
MODELS = ("--text", "models")


def test_several_texts_are_answered_in_runs_that_are_shown(compiled: Any) -> None:
    data = json_of("run", compiled.bundle, *TEXTS)
    assert [each["rows"] for each in data["runs"]] == [[0], [1]]
    assert data["outputs"]["sentence_embedding"]["shape"][0] == 2
    lines = nestforge("run", compiled.bundle, *TEXTS).stdout.splitlines()
    shown = [line.split(" in ")[0] for line in lines if line.startswith("run ")]
    assert shown == ["run 1     row 0 padded b1-s5 -> b1-s8", "run 2     row 1 padded b1-s4 -> b1-s8"]


def test_a_limit_is_judged_by_a_run_that_is_not_the_first(compiled: Any) -> None:
    data = json_of("run", compiled.bundle, *TEXTS[:2], "--latency-ms", "1e6")
    assert data["limit"] == {
        "name": "latency_ms",
        "allowed_ms": 1e6,
        "took_ms": data["timings_ms"]["run"],
        "kept": True,
    }
    assert data["first_run_ms"] != data["timings_ms"]["run"]
    assert data["timings_ms"]["open"] == 0 or data["timings_ms"]["open"] < 1
    lines = nestforge("run", compiled.bundle, *TEXTS[:2], "--latency-ms", "1e6").stdout
    assert "(first run " in lines
    assert "\nlimit     `--latency-ms 1e+06` kept: took " in lines
    alone = nestforge("run", compiled.bundle, *TEXTS[:2]).stdout
    assert ", first run " in alone
    assert "limit" not in alone.replace("no limit given", "")


def test_a_missed_limit_is_said(compiled: Any, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(compiled.bundle, tmp_path / "b"))

    def wrong(record: Any) -> None:
        for point in (point for latency in record["latencies"] for point in latency["points"]):
            for name in [name for name in point if name.endswith("_ms")]:
                point[name] = 1e-6

    edit_sealed(bundle / "build.json", wrong)
    found = nestforge("run", bundle, *TEXTS[:2], "--latency-ms", "1e-5")
    assert found.exit_code == 0
    assert "\nlimit     `--latency-ms 1e-05` missed: took " in found.stdout
    assert found.stderr.startswith("\nwarning: `--latency-ms 1e-05` missed: took ")
    assert "`nestforge measure`" in found.stderr


@pytest.fixture(scope="module")
def prompted(compiled: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of every test here, of a model that has two prompts."""
    bundle = Path(shutil.copytree(compiled.bundle, tmp_path_factory.mktemp("prompted") / "b"))
    prompts = {"query": "a nest ", "passage": "the "}
    edit_manifest(bundle, lambda data: data["text"].update(prompts=prompts, default_prompt="query"))
    return bundle


def test_a_prompt_by_name_is_its_text(prompted: Path) -> None:
    named, own = (
        json_of("run", prompted, *MODELS, "--prompt-name", "passage"),
        json_of("run", prompted, *MODELS, "--prompt", "the "),
    )
    assert named["prompt"] == own["prompt"] == "the "
    assert named["outputs"] == own["outputs"] != json_of("run", prompted, *MODELS)["outputs"]
    assert json_of("run", prompted, *MODELS)["prompt"] == "a nest "
    assert json_of("run", prompted, *MODELS, "--prompt", "")["prompt"] == ""
    shown = nestforge("run", prompted, *MODELS, "--prompt-name", "passage").stdout.splitlines()
    assert [line.split(maxsplit=1) for line in shown if line.startswith("prompt")] == [["prompt", "'the '"]]


def test_prompts_that_there_are_not(compiled: Any, prompted: Path) -> None:
    of_none = error_of("run", compiled.bundle, *MODELS, "--prompt-name", "query")
    assert of_none == "`--prompt-name` 'query': this model has no prompts; give the text as `--prompt`"
    assert json_of("run", compiled.bundle, *MODELS, "--prompt", "a nest ")["prompt"] == "a nest "
    misspelt = error_of("run", prompted, *MODELS, "--prompt-name", "passages")
    assert misspelt == "`--prompt-name` 'passages'; did you mean 'passage'?"
    both = usage_of("run", prompted, *MODELS, "--prompt", "a ", "--prompt-name", "query")
    assert "expected at most one of --prompt and --prompt-name" in both
    for option in (("--prompt", "a "), ("--truncate",)):
        arrays = usage_of("run", prompted, "--inputs", "x.npz", *option)
        assert "--truncate, --prompt and --prompt-name are for texts" in arrays


FEEDS = requests([3, 16, 7])


@pytest.fixture(scope="module")
def exits(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    folder = tmp_path_factory.mktemp("exits")
    bundle = write_exits_bundle(folder / "exits.bundle")
    np.savez(folder / "in.npz", **FEEDS)

    return ("run", bundle, "--inputs", folder / "in.npz")


def test_every_row_and_what_it_cost(exits: tuple[object, ...]) -> None:
    found = every_exit(FEEDS["input_ids"], FEEDS["attention_mask"])
    data = json_of(*exits, "--exits", "0.25,0.5")["exits"]
    assert data["policy"]["thresholds"] == [0.25, 0.5]
    want = []
    for row in range(3):
        index = 0 if found[0][2][row] <= 0.25 else 1 if found[1][2][row] <= 0.5 else 2
        layer = (1, 2, 4)[index]
        want.append({"exit": index, "layer": layer, "entropy": float(found[index][2][row]), "flops": 1600 * layer})
    assert [{**row, "flops_share": None} for row in data["rows"]] == [{**row, "flops_share": None} for row in want]
    assert [row["flops_share"] for row in data["rows"]] == [row["layer"] / 4 for row in want]

    lines = shown(*exits, "--exits", "0.25,0.5").splitlines()
    begin = lines.index("row  left after layer  entropy, nats  FLOPs of whole engine")
    assert [line.split() for line in lines[begin + 1 :]] == [
        [str(i), str(row["layer"]), f"{row['entropy']:.4f}", f"{25 * row['layer']:.1f}", "%"]
        for i, row in enumerate(want)
    ]


def test_one_threshold_none_and_off(exits: tuple[object, ...]) -> None:
    one = json_of(
        *exits,
        "--exits",
        "10",
    )
    assert one["exits"]["policy"]["thresholds"] == [10.0, 10.0]
    assert [row["layer"] for row in one["exits"]["rows"]] == [1, 1, 1]
    default = json_of(*exits)
    assert default["exits"]["policy"]["name"] == "the model's own gate"
    off = json_of(
        *exits,
        "--exits",
        "off",
    )
    assert off["exits"] is None
    assert off["engine"] == "depth4@b4-s16"
    assert "left after layer" not in shown(*exits, "--exits", "off")


def answered(logits: Any) -> Answer:
    array = np.array(logits, np.float32)
    return Answer({"logits": array}, "s", "e", Bucket(1, 1), "shared", "", None, (), Timings(0, 0, 0, 0))


@pytest.fixture
def bundle(compiled: Any) -> Bundle:
    return open_bundle(compiled.bundle)


def with_output(bundle: Bundle, spec: TensorSpec) -> Bundle:
    return replace(bundle, manifest=replace(bundle.manifest, outputs=(spec,)))


def test_the_best_classes_of_each_row(bundle: Bundle) -> None:
    found = best_answers(
        with_output(bundle, TensorSpec("logits", "float32", ("batch", 4))),
        answered([[1, 3, 2, 3], [0, -1, 5, 4]]),
        None,
    )
    assert found == ("class", [[Best(1, 3), Best(3, 3), Best(2, 2)], [Best(2, 5), Best(3, 4), Best(0, 0)]])
    assert str(Best(1, 3.14159)) == "1 3.14"


def test_the_best_tokens_after_each_texts_last(bundle: Bundle) -> None:
    spec = TensorSpec("logits", "float32", ("batch", "sequence", 64), role="next_tokens")
    logits = np.zeros((2, 3, 64))
    logits[0, 1, 4:7], logits[0, 2, 9], logits[1, 2, 7] = [3, 2, 1], 9, 8
    bundle = with_output(bundle, spec)
    what, rows = best_answers(bundle, answered(logits), [2, 5]) or ("", [])
    assert what == "next token"
    assert [[(best.id, best.token) for best in row] for row in rows] == [
        [(4, "the"), (5, "a"), (6, "quick")],
        [(7, "brown"), (0, "[PAD]"), (1, "[UNK]")],
    ]
    assert str(rows[0][0]) == "'the' 3.00"
    bare = replace(bundle, manifest=replace(bundle.manifest, text=None))
    assert [row[0] for row in (best_answers(bare, answered(logits), None) or ("", []))[1]] == [Best(9, 9), Best(7, 8)]


def test_an_encoder_has_none(bundle: Bundle) -> None:
    assert best_answers(bundle, answered([[1]]), None) is None


@pytest.fixture
def exits_bundle(tmp_path: Path) -> Path:
    return write_exits_bundle(tmp_path / "b", [Bucket(1, 8), Bucket(4, 8)])


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    import numpy as np

    np.savez(tmp_path / "inputs.npz", **requests([8, 3]))  # the stubs take a flag by keyword
    assert read_npz(tmp_path / "inputs.npz", 2**20).keys() == {"input_ids", "attention_mask"}
    return tmp_path / "inputs.npz"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (load, bundle_bench):
        monkeypatch.setattr(module, "provider_named", lambda name: None if name == "cpu" else host_provider())


def test_run_says_where_it_ran(exits_bundle: Path, inputs: Path, cuda: None) -> None:
    run = ["run", exits_bundle, "--inputs", inputs, "--exits", "0.3"]
    plain, found = (json_of(*run, *more) for more in ((), ("--provider", "cuda")))
    assert found["outputs"] == plain["outputs"]
    assert found["exits"] == plain["exits"]
    assert found["residency"] == "shared"
    assert "; by ONNX Runtime's provider host; exits: " in found["reason"]
    assert "provider" not in plain["reason"]


def test_bench_measures_there(compiled: Any, cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_bench, "_SECONDS", 0.0)
    arguments = ["bench", compiled.bundle, "--submodel", "XL", "--provider", "cuda"]
    data = json_of(*arguments)
    assert {row["residency"] for row in data["engines"]} == {"shared"}
    assert all(row["memory_bytes"] is None and row["device_bytes"] >= 0 for row in data["engines"])
    assert data["compiled_for_this_host"] is False
    lines = shown(*arguments).splitlines()
    assert "provider      cuda" in lines
    assert any(line.split("  ")[-1].strip() == "on the GPU MB" for line in lines)


@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_host_without_it_says_so_in_one_line(exits_bundle: Path, inputs: Path, command: str, provider: str) -> None:
    more = ["--inputs", inputs] if command == "run" else []
    line = error_of(command, exits_bundle, *more, "--provider", provider)
    assert line.startswith(f"provider {provider}: onnxruntime ")
    assert line.endswith("; install nestforge[cuda] in place of nestforge[cpu]")


def test_an_unknown_provider_is_a_usage_error(exits_bundle: Path) -> None:
    assert "'gpu' is not one of" in usage_of("bench", exits_bundle, "--provider", "gpu")
