"""``nestforge run --prompt`` and ``--prompt-name``: what stands before a text, as text and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from nestforge.tools.cli import main
from support.sealing import edit_manifest


def run(bundle: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["run", str(bundle), "--text", "models", *options])


def answer(bundle: Path, *options: str) -> Any:
    return json.loads(run(bundle, *options, "--json").stdout)


@pytest.fixture(scope="module")
def prompted(compiled: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of every test here, of a model that has two prompts."""
    bundle = Path(shutil.copytree(compiled.bundle, tmp_path_factory.mktemp("prompted") / "b"))
    prompts = {"query": "a nest ", "passage": "the "}
    edit_manifest(bundle, lambda data: data["text"].update(prompts=prompts, default_prompt="query"))
    return bundle


def test_a_prompt_by_name_is_its_text(prompted: Path) -> None:
    named, own = answer(prompted, "--prompt-name", "passage"), answer(prompted, "--prompt", "the ")
    assert named["prompt"] == own["prompt"] == "the "
    assert named["outputs"] == own["outputs"] != answer(prompted)["outputs"]
    assert answer(prompted)["prompt"] == "a nest "
    assert answer(prompted, "--prompt", "")["prompt"] == ""
    shown = run(prompted, "--prompt-name", "passage").stdout.splitlines()
    assert [line.split(maxsplit=1) for line in shown if line.startswith("prompt")] == [["prompt", "'the '"]]


def test_a_model_without_prompts_says_so(compiled: Any) -> None:
    refused = run(compiled.bundle, "--prompt-name", "query")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr == (
        "nestforge: error: `--prompt-name` 'query': this model has no prompts; give the text as `--prompt`\n"
    )
    assert answer(compiled.bundle, "--prompt", "a nest ")["prompt"] == "a nest "


def test_a_name_that_no_prompt_has(prompted: Path) -> None:
    refused = run(prompted, "--prompt-name", "passages")
    assert (refused.exit_code, refused.stderr) == (
        1,
        "nestforge: error: `--prompt-name` 'passages'; did you mean 'passage'?\n",
    )


def test_two_prompts_or_one_without_texts(prompted: Path, tmp_path: Path) -> None:
    both = run(prompted, "--prompt", "a ", "--prompt-name", "query")
    assert both.exit_code == 2
    assert "expected at most one of --prompt and --prompt-name" in both.stderr
    arrays = CliRunner().invoke(main, ["run", str(prompted), "--inputs", str(tmp_path / "x.npz"), "--prompt", "a "])
    assert arrays.exit_code == 2
    assert "--prompt and --prompt-name are for texts" in arrays.stderr
