"""What the commands that train have in common: where their output goes, and how they end when it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from ...errors import NestforgeError, OutputError

C = TypeVar("C", bound=Callable[..., Any])


def output_option(folder: str, holds: str) -> Callable[[C], C]:
    """``--output``, by default ``folder``, which will hold ``holds`` and training.json."""
    return click.option(
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path(folder),
        show_default=True,
        help=f"Folder for {holds} and training.json. What is finished in it is kept.",
    )


@contextmanager
def one_line_errors(output: Path) -> Iterator[None]:
    """Ends the command in one line, with exit code 1, at an error of nestforge's and at ``output`` that cannot be
    written."""
    try:
        yield
    except OSError as failure:
        _fail(OutputError(f"{failure.filename or output}: {failure.strerror}"))
    except NestforgeError as failure:
        _fail(failure)


def _fail(failure: NestforgeError) -> None:
    click.echo(f"train: error: {failure}", err=True)
    raise SystemExit(1)
