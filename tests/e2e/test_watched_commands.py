"""Side effects of commands: no host is looked up, and nothing is written outside the stated folders."""

import json
import re
import shutil
from pathlib import Path

import pytest
from nestforge.profiles.load_profile import dump_profile
from nestforge.tools.cli import COMMANDS
from support.processes import watched
from support.tiny_compile import board, save_tiniest
from support.tiny_models import add_pooling, corpus

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc makes the library that sees system calls")
SETTINGS: dict[str, dict[str, str]] = {"off": {}, "on": {"ORT_DISABLE_TELEMETRY": "0"}}
GOLDEN = Path(__file__).parents[1] / "golden"
# One process for all of them: PyTorch is imported once.
PROGRAM = """
import json, sys
from nestforge.profiles import measure_rates
from nestforge.tools import bundle_bench
from nestforge.tools.cli import main
measure_rates._SECONDS_PER_ROUND = bundle_bench._SECONDS = 0.01
for arguments in json.load(open(sys.argv[1])):
    print("exit code of", arguments[0], main(arguments, standalone_mode=False) or 0, file=sys.stderr)
"""


def test_no_command_looks_up_a_host_or_writes_elsewhere(tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    commands = commands_in(work)
    assert {name for name, *_ in commands} == {*COMMANDS} - {
        "serve",
        "loadtest",
        "farm",
    }  # which take and open connections
    (work / "commands.json").write_text(json.dumps(commands))
    seen = watched(PROGRAM, home, str(work / "commands.json"))
    codes = dict(re.findall(r"^exit code of (\S+) (\d+)$", seen.said, re.MULTILINE))
    assert codes == {**dict.fromkeys((name for name, *_ in commands), "0"), "build": "1"}, seen.said
    assert seen.hosts == ()
    stated, cache = (work, home / "tmp", home / ".cache" / "nestforge"), home / ".cache"
    assert [file for file in seen.files if file != cache and not any(map(file.is_relative_to, stated))] == []


def test_telemetry_of_onnx_runtime_is_off_unless_the_user_turns_it_on(tmp_path: Path) -> None:
    program = "import os, nestforge, onnxruntime; print(os.environ['ORT_DISABLE_TELEMETRY'], file=sys.stderr)"
    off, on = (watched(f"import sys; {program}", tmp_path / name, **own) for name, own in SETTINGS.items())
    assert (off.said.split(), on.said.split()) == (["1"], ["0"])
    assert off.files == ()


def test_files_that_a_program_writes_are_seen(tmp_path: Path) -> None:
    seen = watched("import sys; open(sys.argv[1], 'w').close()", tmp_path / "home", str(tmp_path / "written"))
    assert seen.files == (tmp_path / "written",)


def commands_in(work: Path) -> list[list[str]]:
    """Every command, on a tiny model and on a golden bundle that generates; ``build`` finds no plans to make."""
    for name in ("bundle-fewer-heads", "peft"):
        shutil.copytree(GOLDEN / name, work / name)
    (work / "board.yaml").write_text(dump_profile(board(buckets=["1x16"], budgets={"full": {}})))
    model, adapters = save_tiniest(work / "model"), work / "peft" / "bert"
    add_pooling(adapters / "base")
    # Without it transformers makes a tokenizer of BERT's own in the place of the file's, which parity would say.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (adapters / "base" / "tokenizer_config.json").write_text(json.dumps(settings))
    text, profile = corpus(work / "text.txt", 200), ("--profile", work / "board.yaml", "--levels", "ffn=1")
    bundle, base = work / "bundle", adapters / "base"
    search_ways = ("--budget", "parameters<=100 %", "--evaluations", "4")
    compile_ways = ("--include", "budgets", "--task", f"b={adapters / 'b'}", "--lora-rank", "4")
    found: list[tuple[str | Path, ...]] = [
        ("doctor",),
        ("inspect", model, *profile),
        ("plan", model, *profile),
        ("mixnmatch", model, *profile, "--text", text, *search_ways),
        ("nest", model, "--text", text, "--steps", "1", "--levels", "ffn=0.5,1", "--output", work / "nested"),
        ("convert-coda", model, "--output", work / "coda"),
        ("compile", base, *profile, "--text", text, *compile_ways, "--output", bundle),
        ("add-task", bundle, f"a={adapters / 'a'}", "--against", base),
        ("build", bundle),
        ("measure", bundle, "--force"),
        ("calibrate", work / "bundle-fewer-heads"),
        ("verify", bundle, "--against", base),
        ("parity", bundle, "--against", base),
        ("report", bundle, "--html", work / "page.html"),
        ("export", bundle, "--format", "onnx", "-o", work / "small.onnx"),
        ("consistency", bundle, "--text", text),
        ("run", bundle, "--text", "the fox", "--residency", "mapped"),
        ("generate", work / "bundle-fewer-heads", "--prompt", "the fox", "--max-tokens", "2"),
        ("index", bundle, "--text", text, "--output", work / "index"),
        ("search", bundle, work / "index", "--query", "the fox"),
        ("bench", bundle, "--profile-nodes"),
        ("profile", "--force", "--output", work / "this-host.yaml"),
    ]
    return [[str(argument) for argument in command] for command in found]
