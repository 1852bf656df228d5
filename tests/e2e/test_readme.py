"""What README.md promises is run: make targets exist, nestforge commands and Python work on a tiny model."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from cost_eff_models import save_tiny
from nestforge.compiler.nest import nest
from nestforge.elastic import Bucket
from nestforge.profiles.device_profile import BudgetSpec
from nestforge.profiles.load_profile import dump_profile, load_profile
from nestforge.tools import bundle_bench
from nestforge.tools.cli import main
from tiny_models import add_pooling, corpus, save_tiny_encoder

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
SHELL = [text.splitlines() for language, text in BLOCKS if not language]
PYTHON = [text for language, text in BLOCKS if language == "python"]
NESTFORGE = [[line for line in block if line.startswith("nestforge ")] for block in SHELL]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # As long as host-cpu's largest bucket, which `inspect` shows by default.
    folder = save_tiny_encoder(tmp_path_factory.mktemp("readme") / "tiny", max_position_embeddings=128)
    add_pooling(folder)
    return folder


@pytest.fixture(scope="module")
def exit_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("readme") / "exits", {"max_position_embeddings": 128})
    shutil.copy(tiny_model / "tokenizer.json", folder)
    return folder


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Path, exit_model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A folder to run in, and what stands for the names that the README uses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bundle_bench, "_SECONDS", 0.05)
    monkeypatch.setattr(nest, "DEFAULT_MINUTES", 0.02)
    # A tiny model's latency is all overhead, so its budgets limit parameters instead; two levels keep this quick.
    profile = replace(
        load_profile("laptop-x86"),
        buckets=(Bucket(1, 16),),
        budgets={"full": BudgetSpec(), "fast": BudgetSpec(parameters="80 %")},
        levels={"ffn": (0.5, 1.0), "heads": (0.5, 1.0)},
    )
    (tmp_path / "tiny.yaml").write_text(dump_profile(profile))
    texts = corpus(tmp_path / "calibration.txt").read_text()
    (tmp_path / "corpus.txt").write_text(texts)
    lines = texts.splitlines()[:60]
    rows = [{"text": " ".join(line.split()[:8]), "label": number % 3} for number, line in enumerate(lines)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "MODEL": str(tiny_model),
        "EXIT_MODEL": str(exit_model),
        "path/to/checkpoint": str(tiny_model),
        "host-cpu": "tiny.yaml",
    }


def test_make_targets_exist() -> None:
    mentioned = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, flags=re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= mentioned <= targets


def test_extras_exist() -> None:
    import tomllib

    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    named = re.findall(r"\.\[([a-z,]+)\]", README)
    assert named
    assert {extra for group in named for extra in group.split(",")} <= known


def test_linked_files_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("lines", [lines for lines in NESTFORGE if lines], ids=lambda lines: lines[0])
def test_commands(lines: list[str], workplace: dict[str, str]) -> None:
    runner = CliRunner()
    for line in lines:
        arguments = [workplace.get(word, word) for word in shlex.split(line, comments=True)[1:]]
        result = runner.invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, f"{line}\n{result.output}"
        assert result.stdout


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.split()[1])
def test_python(code: str, workplace: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for name, real in workplace.items():
        code = code.replace(f'"{name}"', repr(real))
    inputs = {name: np.ones((1, 9), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    exec(compile(code, "README.md", "exec"), {"inputs": inputs})  # noqa: S102  (the text is our own)
    assert "sentence_embedding" in capsys.readouterr().out
