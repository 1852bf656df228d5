"""The command line as a whole: exit codes, error lines, purity of stdout, and what it imports."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from nestforge import __version__
from nestforge.bucket import Bucket
from nestforge.errors import NestforgeError
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.compile_request import CompileRequest
from nestforge.tools import cli, interruption
from nestforge.tools.cli import COMMANDS, main
from nestforge.tools.options import BUCKET, BUDGET, EXITS, LEVELS, VARIANT, Written, field_options

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
    assert "--json" in result.output or name in ("serve", "report")  # whose results are a log in JSON and a page


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


# Arguments of each command, of a model or bundle that is not there.
REFUSED = {
    "doctor": None,
    "inspect": "nowhere",
    "report": "nowhere --html page.html",
    "plan": "nowhere",
    "mixnmatch": "nowhere --text t.txt --budget ffn_parameters<=1M",
    "nest": "nowhere --text t.txt --output out",
    "convert-coda": "nowhere --output out",
    "compile": "nowhere --output out --profile laptop-x86",
    "add-task": "nowhere a=folder --against nowhere",
    "build": "nowhere",
    "farm": "nowhere.yaml",
    "measure": "nowhere",
    "calibrate": "nowhere",
    "verify": "nowhere",
    "parity": "nowhere --against nowhere",
    "export": "nowhere --format onnx -o out.onnx",
    "consistency": "nowhere --text t.txt",
    "run": "nowhere --text a",
    "generate": "nowhere --prompt a",
    "index": "nowhere --text t.txt --output out",
    "search": "nowhere nowhere.index --query a",
    "bench": "nowhere",
    "serve": "nowhere --port 0",
    "loadtest": "nowhere",
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
    "export": "nowhere --format triton -o out --bucket 1x8",
    "consistency": "nowhere --text t.txt --data d.npz",
    "run": "nowhere --text a --budget b --submodel c",
    "generate": "nowhere --prompt a --temperature -1",
    "index": "nowhere --output out",
    "search": "nowhere nowhere.index --query a --k 0",
    "bench": "nowhere --at 1x1..8",
    "serve": "nowhere --port 70000",
    "loadtest": "http://127.0.0.1:1",
}


def ran(name: str, arguments: str) -> Result:
    return CliRunner().invoke(main, [name, *arguments.split()])


def require_usage(result: Result) -> None:
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert re.fullmatch(r"nestforge: error: .+; see main [a-z-]+ --help\n", result.stderr), result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_usage_is_2_and_a_refusal_1(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("a text\n")
    require_usage(ran(name, "--no-such-option"))
    if name not in ("serve", "report"):  # which take any number of bundles
        require_usage(ran(name, f"{REFUSED[name] or ''} one too many"))
    if name in MISUSED:
        require_usage(ran(name, MISUSED[name]))
    if (arguments := REFUSED[name]) is not None:
        refused = ran(name, arguments)
        unjudged = name == "parity"  # 1 is its verdict
        assert (refused.exit_code, refused.stdout) == (1 + unjudged, ""), refused.output
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


READ = [
    (BUCKET, "1x128", Bucket(1, 128)),
    (LEVELS, "ffn=0.25,0.5,1", ("ffn", (0.25, 0.5, 1.0))),
    (BUDGET, "flops<=2G", ("flops<=2G", BudgetSpec(flops="2G"))),
    (VARIANT, "moe.combine=one_hot", ("moe.combine", "one_hot")),
    (VARIANT, " mixing = folded ", ("mixing", "folded")),
    (EXITS, "lean", "lean"),
    (EXITS, "0.3", 0.3),
    (EXITS, "0.3,0.5", (0.3, 0.5)),
]
UNREADABLE = [
    (BUCKET, "0x1", "bucket '0x1': expected BATCHxSEQUENCE, such as 1x128"),
    (BUDGET, "flop<=1", "unknown key 'flop'; did you mean 'flops'"),
    *((LEVELS, t, "expected an axis kind and fractions") for t in ("ffn", "=1", "ffn=", "ffn=a,1", "ffn=0.5;1")),
    *((VARIANT, t, "expected a computation and its variant") for t in ("moe.combine", "moe.combine=", "=one_hot")),
]


@pytest.mark.parametrize(("kind", "text", "value"), READ)
def test_values_as_they_are_written(kind: Written, text: str, value: object) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(("kind", "text", "says"), UNREADABLE)
def test_values_that_cannot_be_read(kind: Written, text: str, says: str) -> None:
    with pytest.raises(click.BadParameter, match=re.escape(says)):
        kind(text)


def test_options_that_are_left_out_are_none() -> None:
    """An empty one would replace what the profile has."""
    got: dict[str, Any] = {}
    names = ("levels", "budgets", "buckets", "variants", "precisions", "submodels", "tasks")
    command = click.command()(field_options(CompileRequest, *names)(lambda **given: got.update(given)))
    command.main([], standalone_mode=False)
    assert got == dict.fromkeys(names[:5]) | {"submodels": (), "tasks": {}}
    command.main(["--levels", "ffn=0.5,1", "--bucket", "1x8"], standalone_mode=False)
    assert (got["levels"], got["buckets"]) == ({"ffn": (0.5, 1.0)}, (Bucket(1, 8),))
