"""The ``nestforge`` command line: a few modules of commands, each imported when it is requested.

Exit codes: 0 done; 1 an error the user can mend; 2 wrong usage; 130 interrupted; of each one line on stderr. Anything
else is a bug and keeps its trace.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

import click

from .. import __version__
from ..errors import NestforgeError, OutputError
from ..profiles.backends import BACKENDS, TENSORRT
from ..strict import nearest
from .console import in_options, say
from .interruption import EXIT_CODE, LINE, was_interrupted

# In the order of the help, each with its module in tools/commands.
COMMANDS = {
    "doctor": "host",
    "inspect": "models",
    "report": "models",
    "plan": "models",
    "mixnmatch": "nesting",
    "nest": "nesting",
    "convert-coda": "nesting",
    "compile": "compile",
    "add-task": "compile",
    "build": "compile",
    "farm": "compile",
    "measure": "bench",
    "calibrate": "calibrate",
    "verify": "checks",
    "parity": "parity",
    "export": "export",
    "consistency": "checks",
    "run": "run",
    "generate": "generate",
    "index": "retrieval",
    "search": "retrieval",
    "bench": "bench",
    "serve": "serve",
    "loadtest": "serve",
    "profile": "host",
}

# The extra that brings each package which only some hosts need.
_EXTRAS = {
    "torch": "compile",
    "transformers": "compile",
    "safetensors": "compile",
    "onnx": "compile",
    "onnx_ir": "compile",
    "onnxscript": "compile",
    **{backend.module: backend.extra for backend in BACKENDS.values()},
    "cuda": TENSORRT.extra,
    **dict.fromkeys(("starlette", "uvicorn", "uvloop", "httptools", "prometheus_client"), "serve"),
    **dict.fromkeys(("gevent", "mlperf_loadgen", "tritonclient", "matplotlib"), "loadtest"),
    "ray": "ray",
}

# In newer releases of click a command without any argument, which shows its help.
_HELP: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
# Errors of writing; for files that have a name, their writers say it.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class LazyGroup(click.Group):
    """A group whose commands live in ``tools/commands``; whatever ends one is one line, see ``_one_line``."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click passes it)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  (click passes it)
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f".commands.{COMMANDS[cmd_name]}", __package__)
        return getattr(module, f"{cmd_name.replace('-', '_')}_command")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        with _one_line():
            if sys.stdout is None:  # the next file that is opened would take its place
                raise OutputError("standard output is closed; send it somewhere, /dev/null for one")
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: click.Context) -> object:
        with _one_line():
            return super().invoke(ctx)


@contextmanager
def _one_line() -> Iterator[None]:
    """Ends the command in one line: at nestforge's own errors, at wrong usage, at output that cannot be written, and at
    Ctrl-C, whose line says what to do next if the exception does."""
    try:
        yield
    except BaseException as failure:
        if isinstance(failure, KeyboardInterrupt) or was_interrupted():
            hint = str(failure) if isinstance(failure, KeyboardInterrupt) else ""
            _end(EXIT_CODE, ": ".join(filter(None, [LINE, hint])))
        if isinstance(failure, click.UsageError) and not isinstance(failure, _HELP):
            _end(2, f"nestforge: error: {_usage_problem(failure)}")
        if problem := _problem(failure):
            _end(1, f"nestforge: error: {in_options(problem)}")
        raise


def _usage_problem(failure: click.UsageError) -> str:
    """The mistake, in one line, and where usage is told."""
    problem = " ".join(failure.format_message().split()).rstrip(".")
    return problem if failure.ctx is None else f"{problem}; see {failure.ctx.command_path} --help"


def _problem(failure: BaseException) -> str | None:
    """A problem that the user can mend; None for a bug, and for what click ends by itself."""
    if isinstance(failure, NestforgeError):
        return str(failure)
    if isinstance(failure, ModuleNotFoundError):
        package = (failure.name or "").partition(".")[0]
        if package in _EXTRAS:
            return f"{package} is not installed: pip install 'nestforge[{_EXTRAS[package]}]'"
    if isinstance(failure, OSError) and failure.errno in _UNWRITABLE and failure.filename is None:
        _drop_lost_output()
        return f"standard output, or a temporary file, cannot be written ({failure.strerror})"
    return None


def _drop_lost_output() -> None:
    """Drops output that standard output cannot write, so that Python can end."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _end(code: int, line: str) -> NoReturn:
    with suppress(OSError):  # the exit code is left to say it
        say(line, err=True)
    raise click.exceptions.Exit(code) from None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nestforge")
def main() -> None:
    """Compile one trained elastic model into verified engines, one per device budget, and run them.

    \b
    nestforge compile MODEL --profile host-cpu --output my.bundle
    nestforge run my.bundle --text "Hello" --latency-ms 8
    """
