"""``nestforge measure`` on a small bundle: what it prints and keeps, what the runtime makes of it, how it refuses."""

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.bundle.device_files.device_file import MeasuredHost
from nestforge.bundle.device_files.measurements import Measurements
from nestforge.bundle.manifest import MEASUREMENTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.profiles.probe_host import probe_host
from nestforge.runtime.engines import measure as measuring
from nestforge.runtime.engines.measure import MemoryUse, measured_shapes
from nestforge.tools import bundle_bench, traffic_bench
from support.commands import error_of, json_of, shown, usage_of
from support.commands import nestforge as command
from support.exit_bundles import write_exits_bundle
from support.processes import DEVICE_PROGRAM, needs_root, nobody
from support.refusals import refused
from support.sealing import edit_sealed


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_exits_bundle(tmp_path_factory.mktemp("bundles") / "exits.bundle")


@pytest.fixture
def bundle(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "own.bundle"))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Short rounds, on a host where others use no CPU, or as much as the list says."""
    busy = [0.0]

    class Load:
        def share(self) -> float:
            return busy[0]

    monkeypatch.setattr(measuring, "others_now", lambda _: busy[0])
    monkeypatch.setattr(measuring, "OthersLoad", Load)
    monkeypatch.setattr(measuring, "_ROUND_SECONDS", 0.0)
    return busy


def test_figures_are_printed_kept_shown_and_chosen_by(bundle: Path, quiet: list[float]) -> None:
    printed = shown("measure", bundle, "--threads", "1")
    facts, table = printed.split("\n\n")[:2]
    assert f"kept in  {bundle / MEASUREMENTS_NAME}" in facts
    head, *rows = table.splitlines()
    assert " ".join(head.split()) == "engine weights at p50 ms p95 ms runs spread again others' CPU noisy"
    opened = open_bundle(bundle)
    assert len(rows) == len(opened.manifest.engines)
    kept = Measurements.read(opened)
    (measurement,) = kept.hosts
    assert measurement.threads == 1

    made = f"measured by this host on {measurement.threads} threads, {measurement.created}, in place of the compile's"
    assert made in shown("inspect", bundle)
    assert json_of("inspect", bundle)["measurements"][0]["threads"] == 1
    assert json_of("verify", bundle)["measurements"] == 1
    assert ", 1 measurements of hosts, every hash" in shown("verify", bundle)
    with nestforge.load(bundle, threads=1) as model:
        assert model.choose(1, 8, latency_ms=1e6).reason.startswith("measured here ")


def test_json_has_the_record_and_what_was_left_out(bundle: Path, quiet: list[float]) -> None:
    data = json_of("measure", bundle)
    assert data["path"] == str(bundle / MEASUREMENTS_NAME)
    assert data["left_out"] == {}
    assert data["measurement"]["threads"] == probe_host().cores
    point = data["measurement"]["engines"][0]["points"][0]
    assert set(point) == {"batch", "sequence", "p50_ms", "p95_ms", "noise"}
    assert set(point["noise"]) == {"runs", "spread", "repeat_ratio", "others_share"}


def test_other_hosts_figures_stay(bundle: Path, quiet: list[float]) -> None:
    shown("measure", bundle)
    path = bundle / MEASUREMENTS_NAME
    edit_sealed(path, lambda data: data["hosts"][0]["host"].update(cpu="Cortex-A76", cores=4))
    assert re.search("measured by +Cortex-A76, 4 cores", shown("inspect", bundle))
    shown("measure", bundle)
    kept = Measurements.read(open_bundle(bundle))
    assert [each.host.cpu for each in kept.hosts].count("Cortex-A76") == 1
    assert len(kept.hosts) == 2


def test_a_busy_host_is_refused_and_force_marks(bundle: Path, quiet: list[float], tmp_path: Path) -> None:
    quiet[0] = 0.6
    found = refused(tmp_path, "measure", bundle)
    assert found.startswith("this host: other programs use 60% of the CPUs, expected at most 20%")
    printed = shown("measure", bundle, "--force")
    assert re.search(r"warning: (\d+) of \1 measured latencies, in (\d+) of \2 engines, are noisy", printed)
    assert "other programs used 60% of the CPUs" in printed
    assert {row.split()[-1] for row in printed.split("\n\n")[1].splitlines()[1:]} == {"yes"}
    assert re.search("warning.* noisy", shown("inspect", bundle), re.DOTALL)
    *_, warning = json_of("inspect", bundle)["warnings"]
    assert "in a calm moment `nestforge measure BUNDLE` measures again" in warning
    with (
        nestforge.load(bundle) as model,
        pytest.raises(nestforge.SelectionError, match="noisy figures are not"),
    ):
        model.choose(1, 8, latency_ms=1e-9)


@needs_root
def test_a_bundle_that_cannot_be_written_is_said_before_any_work(bundle: Path, tmp_path: Path) -> None:
    with nobody(bundle):
        found = refused(tmp_path, "measure", bundle)
    assert found == f"{bundle}: cannot be written, so measurements could not be saved; make it writable"


def test_a_damaged_record_is_refused_everywhere_and_never_replaced_unseen(
    bundle: Path, quiet: list[float], tmp_path: Path
) -> None:
    shown("measure", bundle)
    path = bundle / MEASUREMENTS_NAME
    raw = path.read_bytes()
    for broken in (raw[:-1], raw.replace(b"p50_ms", b"p51_ms", 1), b"", b"[" * 100000, b"\xff" * 100):
        path.write_bytes(broken)
        for arguments in (
            ("measure", bundle),
            ("inspect", bundle),
            ("verify", bundle),
            ("run", bundle, "--text", "w1"),
        ):
            found = refused(tmp_path, *arguments)
            assert found.startswith(f"{path}: "), arguments
            assert found.endswith("remove it and run `nestforge measure` again")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.json")
    assert refused(tmp_path, "measure", bundle).startswith(f"{path}: expected a regular file")


def test_wrong_options(bundle: Path, tmp_path: Path) -> None:
    usage_of("measure", bundle, "--threads", "0")
    usage_of("measure", bundle, "--memory-mb", "0")
    assert refused(tmp_path, "measure", bundle, "--threads", "4096").startswith("threads: expected a whole number")
    assert "not a folder" in refused(tmp_path, "measure", tmp_path / "none.bundle")


def test_a_figure_of_another_host_is_not_this_ones(bundle: Path, quiet: list[float]) -> None:
    shown("measure", bundle)
    opened = open_bundle(bundle)
    kept = Measurements.read(opened)
    (bundle / MEASUREMENTS_NAME).unlink()
    from dataclasses import replace

    Measurements.save(opened, replace(kept.hosts[0], host=MeasuredHost("Cortex-A76", "aarch64", 4)))
    with nestforge.load(bundle) as model, pytest.raises(nestforge.SelectionError, match="no latency known"):
        model.choose(1, 8, latency_ms=1e6)


def test_interrupted_it_leaves_what_was_there(bundle: Path, quiet: list[float]) -> None:
    """In a process of its own, on which Ctrl-C falls while engines are timed."""
    shown("measure", bundle)
    before: dict[str, Any] = {path.name: path.read_bytes() for path in bundle.iterdir()}
    program = DEVICE_PROGRAM.replace("main()\n", "").replace(
        "from nestforge.tools.cli import main",
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a test run in the background ignores it
        "from nestforge.tools.interruption import listen\n"
        "from nestforge.runtime.engines import measure as measuring\n"
        "measuring.others_now = lambda seconds: 0.0\n"
        "real = measuring.times_of\n"
        "def announced(*a, **k):\n"
        "    print('timing', flush=True)\n"
        "    time.sleep(60)\n"
        "    return real(*a, **k)\n"
        "measuring.times_of = announced\n"
        "from nestforge.tools.cli import main\n"
        "listen()\n"
        f"main(['measure', {str(bundle)!r}, '--force'])\n",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = ""
    while "timing" not in line:  # what libraries print goes to stderr while a command works
        line = process.stderr.readline()
        assert line, "ended before it timed anything"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "nestforge: interrupted"
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before


RANGES_BUNDLE = Path(__file__).parents[3] / "golden" / "bundle-ranges"


def test_an_engine_of_a_range_is_measured_at_its_shapes(tmp_path: Path, quiet: list[float]) -> None:
    bundle = Path(shutil.copytree(RANGES_BUNDLE, tmp_path / "own.bundle"))
    data = json_of("measure", bundle, "--threads", "1")
    engine = open_bundle(bundle).manifest.engines[0]
    shapes = [(shape.batch, shape.sequence) for shape in measured_shapes(engine.bucket)]
    assert len(shapes) > 4
    first = data["measurement"]["engines"][0]
    assert [(point["batch"], point["sequence"]) for point in first["points"]] == shapes
    with nestforge.load(bundle, threads=1) as model:
        lengths = [model.choose(1, length, submodel=engine.submodel).latency_ms for _, length in shapes]
    by_length = {point["sequence"]: point["p50_ms"] for point in reversed(first["points"]) if point["batch"] == 1}
    assert lengths == [pytest.approx(by_length[length]) for _, length in shapes]


def test_a_compile_that_measured_noise_warns(
    bundle: Path, quiet: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet[0] = 0.6
    shown("measure", bundle, "--force")
    monkeypatch.setattr("nestforge.compiler.compile.prepare", lambda *_: None)
    monkeypatch.setattr("nestforge.compiler.compile.compile_job", lambda *_: bundle)
    printed = shown("compile", tmp_path / "model", "--output", tmp_path / "out")
    *others, line = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert re.match(r"warning: \d+ of \d+ measured latencies, in ", line)
    data = json_of("compile", tmp_path / "model", "--output", tmp_path / "out")
    assert data["warnings"][-1] == line.removeprefix("warning: ")
    assert len(data["warnings"]) == len(others) + 1


TEXTS_BUNDLE = Path(__file__).parents[3] / "golden" / "bundle-texts"  # one bucket, 1x16, and texts of 14 tokens


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_bench, "_SECONDS", 0.0)
    monkeypatch.setattr(bundle_bench, "_SECONDS", 0.0)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "requests.txt"
    path.write_text("".join(f"{'a ' * n}fox\n" for n in range(20)))
    return path


def bench(*arguments: object) -> str:
    return shown("bench", TEXTS_BUNDLE, *arguments)


def test_requests_of_a_file(texts: Path) -> None:
    data = json_of("bench", TEXTS_BUNDLE, "--text", texts, "--concurrency", 2, "--submodel", "50%")
    assert (data["concurrency"], data["lengths"]["texts"], data["lengths"]["found"]) == (2, 20, 20)
    assert [band["texts"] for band in data["lengths"]["bands"]] == [12, 8]
    (row,) = data["submodels"]
    assert row["submodel"] == "ffn16-heads1"
    assert row["requests"] == row["latency_ms"]["runs"] >= 40
    assert row["per_second"] > 0
    assert row["latency_ms"]["p50"] <= row["latency_ms"]["p95"]

    lines = bench("--text", texts, "--submodel", "50%").splitlines()
    assert "at once        1" in lines
    assert "requests       20 texts" in lines
    assert "tokens         median 14, p95 23, longest 24" in lines
    assert "17 to 32      8  40.0%" in lines
    assert lines[-1] == "50%: 10 of 20 requests were cut to what it takes"


def test_some_lines_of_a_long_file_are_said_to_be_drawn(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_bench, "_MOST_TEXTS", 3)
    assert "requests       3 texts of 20, drawn at random" in bench("--text", texts).splitlines()


def test_requests_of_arrays() -> None:
    lines = bench("--concurrency", 2).splitlines()
    assert "requests       random arrays of the engine for the longest row" in lines
    assert [line.split() for line in lines[-2:]] == [["50%", "ffn16-heads1"], ["100%", "ffn32-heads2"]]
    assert json_of("bench", TEXTS_BUNDLE, "--concurrency", 1)["lengths"] is None


def test_time_by_kind_of_node() -> None:
    data = json_of("bench", TEXTS_BUNDLE, "--profile-nodes")
    assert [engine["engine"] for engine in data["engines"]] == ["ffn16-heads1@b1-s16", "ffn32-heads2@b1-s16"]
    for engine in data["engines"]:
        assert engine["runs"] == 20
        assert {"Gemm", "MatMul", "Softmax"} <= {each["kind"] for each in engine["kinds"]}
        assert sum(each["share"] for each in engine["kinds"]) == pytest.approx(1.0)
    lines = bench("--profile-nodes", "--submodel", "100%").splitlines()
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
    assert said in usage_of("bench", TEXTS_BUNDLE, *arguments)


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
        assert error_of("bench", TEXTS_BUNDLE, *arguments).startswith(said)


def test_plans_of_tensorrt_have_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(TEXTS_BUNDLE)
    engines = tuple(replace(engine, backend="tensorrt") for engine in bundle.manifest.engines)
    monkeypatch.setattr(bundle_bench, "runnable_engines", lambda *_: engines)
    assert error_of("bench", TEXTS_BUNDLE, "--profile-nodes") == (
        f"bundle {TEXTS_BUNDLE}: no engine of it runs in ONNX Runtime, which alone profiles nodes"
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
    busy = command("bench", TEXTS_BUNDLE, *mode, "--json")
    data = json.loads(busy.stdout)
    rows = data["submodels" if "--concurrency" in mode else "engines"]
    assert {row["others_share"] for row in rows} == {0.87}
    assert f"warning: {len(rows)} of {len(rows)} rows are noisy: other programs used 87% of the CPUs" in busy.stderr
    for shares[0] in (0.1, None):
        assert "warning" not in command("bench", TEXTS_BUNDLE, *mode).stderr
