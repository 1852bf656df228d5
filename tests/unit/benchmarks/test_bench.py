"""The benchmark runner and its fair timing, on calls that cost nothing; no figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from nestforge.benchmarks import __main__ as runner
from nestforge.benchmarks.harness import Row, interleaved, ratio

EXITS = ["exit_budget", "exit_chain", "exit_eager", "exit_gate", "exit_lengths", "exit_saving"]
NESTED = ["ladder", "switch"]
MIXERS = ["mixer", "moe"]
COMMON = [
    "between",
    "bundle_size",
    "check",
    "compile",
    "dispatch",
    "eager",
    "emit",
    "memory",
    "open",
    "packed",
    "prediction",
    "startup",
]
THREADS = ["beside"]
NAMES = sorted(
    [
        *COMMON,
        *EXITS,
        *NESTED,
        *MIXERS,
        *THREADS,
        "adapters",
        "coda",
        "coda_bytes",
        "correction",
        "mhe",
        "mhe_decode",
        "mhe_long",
        "draft",
        "fusions",
        "generate",
        "generate_memory",
        "lengths",
        "precision",
        "residency",
        "shared_keys",
        "tasks",
        "windows",
    ]
)
REACHED = Row("speed of a thing", "2.0x", ">= 1x", True, "one round")
MISSED = Row("size of a thing", "9 MB", "<= 1 MB", False, "one round")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where real benchmarks keep their bundles."""
    monkeypatch.chdir(tmp_path)


def run_with(monkeypatch: pytest.MonkeyPatch, rows: list[Row], *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, stdout, and the modules that were run, with every benchmark replaced by ``rows``."""
    loaded: list[str] = []

    def load(name: str) -> SimpleNamespace:
        loaded.append(name.rpartition(".")[2])
        return SimpleNamespace(run=lambda: rows)

    monkeypatch.setattr(runner.importlib, "import_module", load)
    done = CliRunner().invoke(runner.main, arguments)
    return done.exit_code, done.stdout, loaded


def test_every_figure_of_the_table_has_a_benchmark() -> None:
    assert list(runner.benchmarks()) == NAMES


def test_without_a_name_all_run_and_a_missed_bar_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, loaded = run_with(monkeypatch, [REACHED])
    assert (code, loaded) == (0, [f"bench_{name}" for name in NAMES])
    assert text.count("reached") == len(NAMES)
    code, text, loaded = run_with(monkeypatch, [REACHED, MISSED], "emit")
    assert (code, loaded) == (1, ["bench_emit"])
    assert "MISSED" in text


def test_json_holds_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = run_with(monkeypatch, [REACHED, MISSED], "memory", "--json")
    assert code == 1
    assert [(row["figure"], row["reached"]) for row in json.loads(text)] == [
        ("speed of a thing", True),
        ("size of a thing", False),
    ]


def test_alternatives_take_turns_and_each_round_begins_warm() -> None:
    order: list[str] = []
    calls = {"plain": lambda: order.append("plain"), "ours": lambda: order.append("ours")}
    times = interleaved(calls, rounds=2, runs=3, warmup=1)
    assert order == ["plain", "ours", *2 * (["plain"] * 4 + ["ours"] * 4)]
    assert {name: len(rounds) for name, rounds in times.items()} == {"plain": 2, "ours": 2}


def test_ratio_is_the_median_over_rounds() -> None:
    assert ratio({"plain": [2.0, 9.0, 30.0], "ours": [1.0, 3.0, 5.0]}, "plain", "ours") == 3.0
