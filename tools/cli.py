"""The ``nestforge`` command line: one thin module per command, imported when it is asked for.

Exit codes: 0 done; 1 an error the user can mend, one line on stderr; 2 wrong usage; 130 interrupted. Anything else is
a bug and keeps its trace.
"""

from __future__ import annotations

from importlib import import_module
from typing import NoReturn

import click

from .. import __version__
from ..errors import NestforgeError
from .console import say

COMMANDS = (
    "doctor",
    "inspect",
    "plan",
    "mixnmatch",
    "nest",
    "compile",
    "build",
    "calibrate",
    "verify",
    "consistency",
    "run",
    "index",
    "search",
    "bench",
    "profile",
)

# The extra that brings each package which only some hosts need.
_EXTRAS = {
    "torch": "compile",
    "transformers": "compile",
    "safetensors": "compile",
    "onnx": "compile",
    "onnx_ir": "compile",
    "onnxscript": "compile",
    "onnxruntime": "cpu",
    "tensorrt": "tensorrt",
    "cuda": "tensorrt",
}


class LazyGroup(click.Group):
    """A group whose commands live in ``tools/commands``; turns nestforge's own errors into one line and exit code 1.

    An interruption (Ctrl-C) is one line and exit code 130, as shells have it; its text says what to do next.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click passes it)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  (click passes it)
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f".commands.{cmd_name}", __package__).command
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except NestforgeError as failure:
            _fail(ctx, str(failure))
        except ModuleNotFoundError as failure:
            package = (failure.name or "").partition(".")[0]
            if package not in _EXTRAS:
                raise
            _fail(ctx, f"{package} is not installed: pip install 'nestforge[{_EXTRAS[package]}]'")
        except KeyboardInterrupt as interruption:
            say(": ".join(filter(None, ["nestforge: interrupted", str(interruption)])), err=True)
            ctx.exit(130)


def _fail(ctx: click.Context, message: str) -> NoReturn:
    say(f"nestforge: error: {message}", err=True)
    ctx.exit(1)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nestforge")
def main() -> None:
    """Compile one trained elastic model into verified engines, one per device budget, and run them.

    \b
    nestforge compile MODEL --profile host-cpu --output my.bundle
    nestforge run my.bundle --text "Hello" --latency-ms 8
    """
