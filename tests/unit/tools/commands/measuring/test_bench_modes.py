"""``nestforge bench`` with ``--text``, ``--concurrency`` and ``--profile-nodes``: what it prints and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.engines.measure import MemoryUse
from nestforge.tools import bundle_bench, traffic_bench
from nestforge.tools.cli import main

GOLDEN = Path(__file__).resolve().parents[4] / "golden" / "bundle-texts"  # one bucket, 1x16, and texts of 14 tokens


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_bench, "_SECONDS", 0.0)
    monkeypatch.setattr(bundle_bench, "_SECONDS", 0.0)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "requests.txt"
    path.write_text("".join(f"{'a ' * n}fox\n" for n in range(20)))
    return path


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", str(GOLDEN), *map(str, arguments)], catch_exceptions=False)


def test_requests_of_a_file(texts: Path) -> None:
    data = json.loads(bench("--text", texts, "--concurrency", 2, "--submodel", "50%", "--json").stdout)
    assert (data["concurrency"], data["lengths"]["texts"], data["lengths"]["found"]) == (2, 20, 20)
    assert [band["texts"] for band in data["lengths"]["bands"]] == [12, 8]
    (row,) = data["submodels"]
    assert row["submodel"] == "ffn16-heads1"
    assert row["requests"] == row["latency_ms"]["runs"] >= 40
    assert row["per_second"] > 0
    assert row["latency_ms"]["p50"] <= row["latency_ms"]["p95"]

    lines = bench("--text", texts, "--submodel", "50%").stdout.splitlines()
    assert "at once        1" in lines
    assert "requests       20 texts" in lines
    assert "tokens         median 14, p95 23, longest 24" in lines
    assert "17 to 32      8  40.0%" in lines
    assert lines[-1] == "50%: 10 of 20 requests were cut to what it takes"


def test_some_lines_of_a_long_file_are_said_to_be_drawn(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_bench, "_MOST_TEXTS", 3)
    assert "requests       3 texts of 20, drawn at random" in bench("--text", texts).stdout.splitlines()


def test_requests_of_arrays() -> None:
    lines = bench("--concurrency", 2).stdout.splitlines()
    assert "requests       random arrays of the engine for the longest row" in lines
    assert [line.split() for line in lines[-2:]] == [["50%", "ffn16-heads1"], ["100%", "ffn32-heads2"]]
    assert json.loads(bench("--concurrency", 1, "--json").stdout)["lengths"] is None


def test_time_by_kind_of_node() -> None:
    data = json.loads(bench("--profile-nodes", "--json").stdout)
    assert [engine["engine"] for engine in data["engines"]] == ["ffn16-heads1@b1-s16", "ffn32-heads2@b1-s16"]
    for engine in data["engines"]:
        assert engine["runs"] == 20
        assert {"Gemm", "MatMul", "Softmax"} <= {each["kind"] for each in engine["kinds"]}
        assert sum(each["share"] for each in engine["kinds"]) == pytest.approx(1.0)
    lines = bench("--profile-nodes", "--submodel", "100%").stdout.splitlines()
    start = lines.index("100%@b1-s16 at 1x16, 20 runs")
    assert lines[start + 1].split() == ["node", "nodes", "ms", "a", "run", "share"]
    assert lines[start + 10].split()[1:3] == ["other", "kinds"]
    assert lines[-1] == "the profiler itself takes time at every node: shares count, not milliseconds"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile-nodes", "--concurrency", "2"], "--profile-nodes is for engines on the processor, without --text"),
        (["--profile-nodes", "--provider", "cuda"], "--profile-nodes is for engines on the processor, without --text"),
        (["--concurrency", "2", "--at", "1x16"], "--at is for engines, without --text and --concurrency"),
        (["--at", "1x1..16"], "1x1..16: expected one shape, such as 1x16"),
        (["--concurrency", "0"], "0 is not in the range 1<=x<=256"),
        (["--concurrency", "1000"], "1000 is not in the range 1<=x<=256"),
    ],
)
def test_usage(arguments: list[str], said: str) -> None:
    result = bench(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_refuses_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    for arguments, said in (
        (["--text", tmp_path / "none.txt"], f"{tmp_path / 'none.txt'}: "),
        (["--text", empty], f"{empty}: has no texts; expected one a line"),
        (["--concurrency", 2, "--submodel", "XXL"], "no submodel 'XXL' in this bundle; it has "),
        (["--at", "1x16"], "shape 1x16: expected one of a range of this bundle's engines, there is none"),
        (["--profile-nodes", "--submodel", "XXL"], "no submodel 'XXL' in this bundle; it has "),
    ):
        result = bench(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"nestforge: error: {said}")


def test_plans_of_tensorrt_have_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(GOLDEN)
    engines = tuple(replace(engine, backend="tensorrt") for engine in bundle.manifest.engines)
    monkeypatch.setattr(bundle_bench, "runnable_engines", lambda *_: engines)
    result = bench("--profile-nodes")
    assert result.exit_code == 1
    assert result.stderr == (
        f"nestforge: error: bundle {GOLDEN}: its engines are TensorRT plans, which ONNX Runtime cannot profile\n"
    )


@pytest.mark.parametrize("mode", [("--concurrency", "1"), ("--submodel", "50%")], ids=["requests", "engines"])
def test_figures_taken_beside_other_programs_are_marked(mode: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float | None] = [0.87]

    class Load:
        def share(self) -> float | None:
            return shares[0]

    monkeypatch.setattr(traffic_bench, "OthersLoad", Load)
    monkeypatch.setattr(bundle_bench, "OthersLoad", Load)
    monkeypatch.setattr(bundle_bench, "memory_use", lambda *_: MemoryUse(1, 1))
    busy = bench(*mode, "--json")
    data = json.loads(busy.stdout)
    rows = data["submodels" if "--concurrency" in mode else "engines"]
    assert {row["others_share"] for row in rows} == {0.87}
    assert f"warning: {len(rows)} of {len(rows)} rows are noisy: other programs used 87% of the CPUs" in busy.stderr
    for shares[0] in (0.1, None):
        assert "warning" not in bench(*mode).stderr
