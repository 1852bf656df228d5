"""What a refusal looks like on the command line: one line, nothing changed."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner
from nestforge.tools.cli import main


def contents(folder: Path) -> dict[str, object]:
    """Every path below ``folder``, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(folder: Path, *arguments: object, code: int = 1) -> str:
    """The one line with which the command line refuses; nothing in ``folder`` may have changed."""
    before = contents(folder)
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.exit_code, result.stderr, result.exception)
    assert result.stdout == ""
    assert contents(folder) == before, "something was left behind"
    if code == 2:
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
        return line
    match = re.fullmatch(r"(?:[a-z ]+: \d+/\d+\n)*nestforge: error: ([^\n]{1,800})\n", result.stderr)  # after progress
    assert match, result.stderr
    return match[1]
