"""The benchmark runner and its fair timing, on calls that cost nothing; the tool behind `make zoo` and its tables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from nestforge.benchmarks import __main__ as runner
from nestforge.benchmarks.architecture_tables import main_tables, read_found
from nestforge.benchmarks.harness import BENCHMARKS, Row, forget_what_others_made, interleaved, ratio

ROOT = Path(__file__).parents[3]
NAMES = [
    *("between", "bundle_size", "compile", "dispatch", "eager", "emit", "generate", "generate_memory", "ladder"),
    *("lengths", "memory", "open", "packed", "precision", "prediction", "serving", "serving_memory", "startup"),
    "switch",
]
REACHED = Row("speed of a thing", "2.0x", ">= 1x", True, "one round")
MISSED = Row("size of a thing", "9 MB", "<= 1 MB", False, "one round")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where real benchmarks keep their bundles."""
    monkeypatch.chdir(tmp_path)


def run_with(monkeypatch: pytest.MonkeyPatch, rows: list[Row], *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, stdout, and the benchmarks that were run, with every one replaced by ``rows``."""
    asked: list[str] = []
    for name in NAMES:
        monkeypatch.setitem(BENCHMARKS, name, lambda name=name: asked.append(name) or rows)
    done = CliRunner().invoke(runner.main, arguments)
    return done.exit_code, done.stdout, asked


def test_every_figure_of_the_table_has_a_benchmark() -> None:
    assert sorted(BENCHMARKS) == NAMES


def test_pages_name_benchmarks_that_there_are() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"nestforge\.benchmarks ([a-z_]+)", page.read_text())}
    assert named
    assert named <= BENCHMARKS.keys()


def test_without_a_name_all_run_and_a_missed_bar_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, asked = run_with(monkeypatch, [REACHED])
    assert (code, asked) == (0, NAMES)
    assert text.count("reached") == len(NAMES)
    code, text, asked = run_with(monkeypatch, [REACHED, MISSED], "emit")
    assert (code, asked) == (1, ["emit"])
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


def test_what_is_kept_is_of_the_sources(tmp_path: Path) -> None:
    package, kept = tmp_path / "package", tmp_path / "kept"
    (package / "compiler").mkdir(parents=True)
    (package / "tools").mkdir()
    source = package / "compiler" / "one.py"
    source.write_text("a = 1\n")
    assert not forget_what_others_made(kept, package)

    (kept / "some.bundle").mkdir()
    (package / "tools" / "bench.py").write_text("")
    assert not forget_what_others_made(kept, package)
    assert (kept / "some.bundle").exists()

    source.write_text("a = 2\n")
    assert forget_what_others_made(kept, package)
    assert not (kept / "some.bundle").exists()
    assert not forget_what_others_made(kept, package)


def test_a_folder_without_a_mark_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "kept" / "old.bundle").mkdir(parents=True)
    (tmp_path / "package").mkdir()
    assert forget_what_others_made(tmp_path / "kept", tmp_path / "package")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["sources.sha256"]


SAMPLE = {"olmo2": "Olmo2ForCausalLM", "convnext": "ConvNextModel", "led": "LEDForConditionalGeneration"}


def test_a_sample_is_tried_and_tabled(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nestforge.benchmarks.architectures", "--jobs", "2"]
    subprocess.run([*command, "--results", str(tmp_path / "found"), *SAMPLE], check=True, capture_output=True)
    by_class = read_found(tmp_path / "found")
    found = {f"{kind}/{name}": by_class.pop(f"{kind}/{name}") for kind, name in SAMPLE.items()}
    assert by_class == {}
    text, image, refused = found.values()
    assert (text["result"], text["generates"], text["axes"]) == ("range", "tokens", "ffn")
    assert (image["result"], image["axes"]) == ("batch", "ffn")
    # PyTorch itself runs it, so it counts as refused.
    assert (refused["result"], refused["torch"]) == ("not understood", "")
    assert "LEDForConditionalGeneration does not run without numbers at modeling_led.py" in refused["reason"]
    text_key, image_key, refused_key = found
    lines = main_tables(found, [text_key, refused_key, "bert/BertModel", image_key], "transformers")
    assert lines[0].startswith("transformers: 3 of 4 types tried. No small model could be made of 0,")
    assert "| compile and pass, of those that PyTorch runs | 2 of 3, 67 % |" in lines
    assert "| write what transformers' `generate` writes, of classes that write and compile | 1 of 1, 100 % |" in lines
    assert "| inputs of one size, any batch | 1 | `convnext` |" in lines
    assert any(line.startswith("| `led` | not understood | `LEDForConditionalGeneration does not") for line in lines)
