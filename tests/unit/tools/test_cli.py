"""The command line as a whole: exit codes, error lines, purity of stdout, and what it imports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from nestforge import __version__
from nestforge.errors import NestforgeError
from nestforge.tools import cli, interruption

HEAVY = ("torch", "transformers", "onnx", "onnxscript", "nestforge.compiler", "nestforge.exporters")


def in_fresh_python(arguments: list[str]) -> tuple[int, set[str]]:
    """Exit code of ``nestforge ARGUMENTS`` in a new process, and the modules it imported."""
    code = (
        "import sys\n"
        "from nestforge.tools.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n"
        "    print('\\n', *sys.modules, file=sys.stderr)\n    sys.exit(end.code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, set(done.stderr.splitlines()[-1].split())


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code, modules = in_fresh_python(["--help"])
    assert code == 0
    assert not modules.intersection(HEAVY)
    out = CliRunner().invoke(cli.main, ["--help"]).output
    listed = [line.split()[0] for line in out.partition("Commands:")[2].splitlines() if line.strip()]
    assert listed == list(cli.COMMANDS)


@pytest.mark.parametrize("arguments", [["run", "nowhere", "--text", "a"], ["bench", "nowhere"], ["verify", "nowhere"]])
def test_device_commands_import_nothing_heavy(arguments: list[str]) -> None:
    code, modules = in_fresh_python(arguments)
    assert code == 1
    assert not modules.intersection(HEAVY)


def test_doctor_imports_no_torch() -> None:
    code, modules = in_fresh_python(["doctor", "--json"])
    assert code == 0
    assert not modules.intersection(HEAVY)


def test_version() -> None:
    assert CliRunner().invoke(cli.main, ["--version"]).output == f"nestforge, version {__version__}\n"


def test_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(cli.main, ["compiel"])
    assert result.exit_code == 2
    assert "No such command 'compiel'" in result.stderr


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example_and_json(name: str) -> None:
    result = CliRunner().invoke(cli.main, [name, "--help"])
    assert result.exit_code == 0
    assert re.search(rf"Examples:\n +nestforge {name}\b", result.output)
    assert "--json" in result.output


@click.command
def failing() -> None:
    raise NestforgeError("here: expected a, got b; do c")


@click.command
def unequipped() -> None:
    raise ModuleNotFoundError("No module named 'onnx_ir.passes'", name="onnx_ir.passes")


@click.command
def buggy() -> None:
    raise ModuleNotFoundError("No module named 'misspelt'", name="misspelt")


def group_with(command: click.Command, monkeypatch: pytest.MonkeyPatch) -> click.Command:
    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: command)
    return cli.main


def test_a_nestforge_error_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(group_with(failing, monkeypatch), ["x"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "nestforge: error: here: expected a, got b; do c\n"


def test_a_missing_package_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(group_with(unequipped, monkeypatch), ["x"])
    assert result.exit_code == 1
    assert result.stderr == "nestforge: error: onnx_ir is not installed: pip install 'nestforge[compile]'\n"


def test_a_bug_keeps_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(group_with(buggy, monkeypatch), ["x"])
    assert isinstance(result.exception, ModuleNotFoundError)


@click.command
def stopped() -> None:
    raise KeyboardInterrupt


def test_an_interruption_is_one_line_and_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(group_with(stopped, monkeypatch), ["x"])
    assert (result.exit_code, result.output) == (130, "nestforge: interrupted\n")


@click.command
def converted() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as failure:
        raise ImportError("initialization failed") from failure  # as compiled modules have it


def test_what_an_interruption_was_made_into_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(CliRunner().invoke(group_with(converted, monkeypatch), ["x"]).exception, ImportError)
    monkeypatch.setattr(interruption, "_seen", True)
    result = CliRunner().invoke(group_with(converted, monkeypatch), ["x"])
    assert (result.exit_code, result.output) == (130, "nestforge: interrupted\n")


@pytest.mark.parametrize("arguments", [["doctor"], ["--version"], ["compile", "x", "--output", "y"]])
def test_a_closed_standard_output_is_one_line_before_any_work(arguments: list[str]) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "nestforge", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    expected = "standard output is closed; send it somewhere, /dev/null for one"
    assert (done.returncode, done.stderr) == (1, f"nestforge: error: {expected}\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_is_one_line(unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nestforge", "doctor"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    expected = "standard output, or a temporary file, cannot be written (No space left on device)"
    assert (done.returncode, done.stderr) == (1, f"nestforge: error: {expected}\n")


def test_a_closed_standard_error_is_nobodys_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nestforge", "doctor"],
        capture_output=True,
        check=False,
        preexec_fn=lambda: os.close(2),
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stdout


def test_installed_script_keeps_stdout_for_json(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("nestforge")
    done = subprocess.run([script, "doctor", "--json"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout)["nestforge"] == __version__
    failed = subprocess.run([script, "inspect", "nowhere"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("nestforge: error: nowhere: no such folder")
    assert failed.stderr.count("\n") == 1
