"""Exit codes of every command: 2 for wrong usage, 1 for a refusal, each with its reason and nothing on stdout."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from nestforge.tools.cli import COMMANDS, main

# What each command takes, of a model or bundle that is not there.
REFUSED = {
    "doctor": None,
    "inspect": "nowhere",
    "plan": "nowhere",
    "mixnmatch": "nowhere --text t.txt --budget ffn_parameters<=1M",
    "nest": "nowhere --text t.txt --output out",
    "convert-coda": "nowhere --output out",
    "compile": "nowhere --output out --profile laptop-x86",
    "add-task": "nowhere a=folder --against nowhere",
    "build": "nowhere",
    "measure": "nowhere",
    "calibrate": "nowhere",
    "verify": "nowhere",
    "consistency": "nowhere --text t.txt",
    "run": "nowhere --text a",
    "generate": "nowhere --prompt a",
    "index": "nowhere --text t.txt --output out",
    "search": "nowhere nowhere.index --query a",
    "bench": "nowhere",
    "profile": "--output no/such/folder.yaml",
}
# Options that contradict each other, or values beyond what an option takes.
MISUSED = {
    "inspect": "nowhere --bucket 1y8",
    "plan": "nowhere --budget latency_ms<=",
    "mixnmatch": "nowhere --text t.txt --budget nothing",
    "nest": "nowhere --text t.txt --output out --minutes 1 --steps 1",
    "convert-coda": "nowhere --output out --adapter none",
    "compile": "nowhere --output out --text t.txt --data d.npz",
    "add-task": "nowhere a --against nowhere",
    "measure": "nowhere --threads 0",
    "calibrate": "nowhere --data d.npz",
    "consistency": "nowhere --text t.txt --data d.npz",
    "run": "nowhere --text a --budget b --submodel c",
    "generate": "nowhere --prompt a --temperature -1",
    "index": "nowhere --output out",
    "search": "nowhere nowhere.index --query a --k 0",
    "bench": "nowhere --at 1x1..8",
}


def ran(name: str, arguments: str) -> Result:
    return CliRunner().invoke(main, [name, *arguments.split()])


def require_usage(result: Result) -> None:
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "\nError: " in result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_usage_is_2_and_a_refusal_1(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("a text\n")
    require_usage(ran(name, "--no-such-option"))
    require_usage(ran(name, f"{REFUSED[name] or ''} one too many"))
    if name in MISUSED:
        require_usage(ran(name, MISUSED[name]))
    if (arguments := REFUSED[name]) is not None:
        refused = ran(name, arguments)
        assert (refused.exit_code, refused.stdout) == (1, ""), refused.output
        assert refused.stderr.splitlines()[-1].startswith("nestforge: error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(["compil"], "'compile'"), (["convert-cod"], "'convert-coda'"), (["plan", "--buget"], "--budg")],
)
def test_a_slip_of_the_fingers_is_answered_with_what_was_meant(typed: list[str], meant: str) -> None:
    result = CliRunner().invoke(main, typed)
    assert result.exit_code == 2
    assert "id you mean" in result.stderr
    assert meant in result.stderr
