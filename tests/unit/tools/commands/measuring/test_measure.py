"""``nestforge measure`` on a small bundle: what it prints and keeps, what the runtime makes of it, how it refuses."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import nestforge
import pytest
from click.testing import CliRunner, Result
from nestforge.bundle.device_files.device_file import MeasuredHost
from nestforge.bundle.device_files.measurements import keep_measurement, read_measurements
from nestforge.bundle.manifest import MEASUREMENTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.profiles.probe_host import probe_host
from nestforge.runtime.engines import measure as measuring
from nestforge.runtime.engines.measure import measured_shapes
from nestforge.tools.cli import main
from support.device_program import PROGRAM
from support.exit_bundles import write_exits_bundle
from support.nobody import needs_root, nobody
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


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_figures_are_printed_kept_shown_and_chosen_by(bundle: Path, quiet: list[float]) -> None:
    result = run("measure", bundle, "--threads", "1")
    assert result.exit_code == 0, result.output
    facts, table = result.stdout.split("\n\n")[:2]
    assert f"kept in  {bundle / MEASUREMENTS_NAME}" in facts
    head, *rows = table.splitlines()
    assert head.split() == [
        "engine",
        "weights",
        "at",
        "p50",
        "ms",
        "p95",
        "ms",
        "runs",
        "spread",
        "again",
        "others'",
        "CPU",
        "noisy",
    ]
    opened = open_bundle(bundle)
    assert len(rows) == len(opened.manifest.engines)
    kept = read_measurements(opened)
    assert kept is not None
    (measurement,) = kept.hosts
    assert measurement.threads == 1

    shown = run("inspect", bundle)
    assert (
        f"measured by this host on {measurement.threads} threads, {measurement.created}, in place of the compile's"
        in shown.stdout
    )
    assert json.loads(run("inspect", bundle, "--json").stdout)["measurements"][0]["threads"] == 1
    assert json.loads(run("verify", bundle, "--json").stdout)["measurements"] == 1
    assert ", 1 measurements of hosts, every hash" in run("verify", bundle).stdout
    with nestforge.load(bundle, threads=1) as model:
        assert model.choose(1, 8, latency_ms=1e6).reason.startswith("measured here ")


def test_json_has_the_record_and_what_was_left_out(bundle: Path, quiet: list[float]) -> None:
    result = run("measure", bundle, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["path"] == str(bundle / MEASUREMENTS_NAME)
    assert data["left_out"] == {}
    assert data["measurement"]["threads"] == probe_host().cores
    point = data["measurement"]["engines"][0]["points"][0]
    assert set(point) == {"batch", "sequence", "p50_ms", "p95_ms", "noise"}
    assert set(point["noise"]) == {"runs", "spread", "repeat_ratio", "others_share"}


def test_other_hosts_figures_stay(bundle: Path, quiet: list[float]) -> None:
    assert run("measure", bundle).exit_code == 0
    path = bundle / MEASUREMENTS_NAME
    edit_sealed(path, lambda data: data["hosts"][0]["host"].update(cpu="Cortex-A76", cores=4))
    assert re.search("measured by +Cortex-A76, 4 cores", run("inspect", bundle).stdout)
    assert run("measure", bundle).exit_code == 0
    kept = read_measurements(open_bundle(bundle))
    assert kept is not None
    assert [each.host.cpu for each in kept.hosts].count("Cortex-A76") == 1
    assert len(kept.hosts) == 2


def test_a_busy_host_is_refused_and_force_marks(bundle: Path, quiet: list[float], tmp_path: Path) -> None:
    quiet[0] = 0.6
    found = refused(tmp_path, "measure", bundle)
    assert found.startswith("this host: other programs use 60% of the CPUs, expected at most 20%")
    result = run("measure", bundle, "--force")
    assert result.exit_code == 0, result.output
    assert re.search(r"warning: (\d+) of \1 measured latencies, in (\d+) of \2 engines, are noisy", result.stdout)
    assert "other programs used 60% of the CPUs" in result.stdout
    assert {row.split()[-1] for row in result.stdout.split("\n\n")[1].splitlines()[1:]} == {"yes"}
    shown = run("inspect", bundle)
    assert "warning" in shown.stdout
    assert " noisy" in shown.stdout
    *_, warning = json.loads(run("inspect", bundle, "--json").stdout)["warnings"]
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
    assert found == f"{bundle}: cannot be written, so measurements could not be kept; make it writable"


def test_a_damaged_record_is_refused_everywhere_and_never_replaced_unseen(
    bundle: Path, quiet: list[float], tmp_path: Path
) -> None:
    assert run("measure", bundle).exit_code == 0
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
    assert run("measure", bundle, "--threads", "0").exit_code == 2
    assert run("measure", bundle, "--memory-mb", "0").exit_code == 2
    assert refused(tmp_path, "measure", bundle, "--threads", "4096").startswith("threads: expected a whole number")
    assert "not a folder" in refused(tmp_path, "measure", tmp_path / "none.bundle")


def test_a_figure_of_another_host_is_not_this_ones(bundle: Path, quiet: list[float]) -> None:
    assert run("measure", bundle).exit_code == 0
    opened = open_bundle(bundle)
    kept = read_measurements(opened)
    assert kept is not None
    (bundle / MEASUREMENTS_NAME).unlink()
    from dataclasses import replace

    keep_measurement(opened, replace(kept.hosts[0], host=MeasuredHost("Cortex-A76", "aarch64", 4)))
    with nestforge.load(bundle) as model, pytest.raises(nestforge.SelectionError, match="no latency known"):
        model.choose(1, 8, latency_ms=1e6)


def test_interrupted_it_leaves_what_was_there(bundle: Path, quiet: list[float]) -> None:
    """In a process of its own, on which Ctrl-C falls while engines are timed."""
    assert run("measure", bundle).exit_code == 0
    before: dict[str, Any] = {path.name: path.read_bytes() for path in bundle.iterdir()}
    program = PROGRAM.replace("main()\n", "").replace(
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
    assert process.stderr is not None
    line = ""
    while "timing" not in line:  # what libraries print goes to stderr while a command works
        line = process.stderr.readline()
        assert line, "ended before it timed anything"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "nestforge: interrupted"
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before


GOLDEN = Path(__file__).parents[4] / "golden" / "bundle-ranges"


def test_an_engine_of_a_range_is_measured_at_its_shapes(tmp_path: Path, quiet: list[float]) -> None:
    bundle = Path(shutil.copytree(GOLDEN, tmp_path / "own.bundle"))
    result = run("measure", bundle, "--threads", "1", "--json")
    assert result.exit_code == 0, result.output
    engine = open_bundle(bundle).manifest.engines[0]
    shapes = [(shape.batch, shape.sequence) for shape in measured_shapes(engine.bucket)]
    assert len(shapes) > 4
    first = json.loads(result.stdout)["measurement"]["engines"][0]
    assert [(point["batch"], point["sequence"]) for point in first["points"]] == shapes
    with nestforge.load(bundle, threads=1) as model:
        lengths = [model.choose(1, length, submodel=engine.submodel).latency_ms for _, length in shapes]
    by_length = {point["sequence"]: point["p50_ms"] for point in reversed(first["points"]) if point["batch"] == 1}
    assert lengths == [pytest.approx(by_length[length]) for _, length in shapes]


def test_a_compile_that_measured_noise_warns(
    bundle: Path, quiet: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet[0] = 0.6
    assert run("measure", bundle, "--force").exit_code == 0
    monkeypatch.setattr("nestforge.compiler.compile.compile_bundle", lambda *_, **__: bundle)
    shown = run("compile", tmp_path / "model", "--output", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    *others, line = [line for line in shown.stdout.splitlines() if line.startswith("warning: ")]
    assert re.match(r"warning: \d+ of \d+ measured latencies, in ", line)
    data = json.loads(run("compile", tmp_path / "model", "--output", tmp_path / "out", "--json").stdout)
    assert data["warnings"][-1] == line.removeprefix("warning: ")
    assert len(data["warnings"]) == len(others) + 1
