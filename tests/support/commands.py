"""Commands as a shell runs them: what they print, as JSON, or the line with which they refuse."""

import json
from typing import Any

from click.testing import CliRunner, Result
from nestforge.tools.cli import main


def nestforge(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def shown(*arguments: object) -> str:
    """Output of a command that succeeds."""
    result = nestforge(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def json_of(*arguments: object) -> Any:
    return json.loads(shown(*arguments, "--json"))


def error_of(*arguments: object) -> str:
    """The last line on stderr, behind progress, of a command that fails with exit code 1 and prints nothing."""
    result = nestforge(*arguments)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    *before, line = result.stderr.splitlines()
    assert line.startswith("nestforge: error: ")
    assert not any("Traceback" in each or each.startswith("nestforge: ") for each in before), before
    return line.removeprefix("nestforge: error: ")


def usage_of(*arguments: object) -> str:
    """The line on stderr about wrong usage, exit code 2."""
    result = nestforge(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr
