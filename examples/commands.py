"""Shared by the commands that train: where their output goes, and how they end when it fails."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from ..bundle.open_bundle import open_bundle
from ..compiler.provenance import source_entries
from ..errors import NestforgeError, OutputError
from ..exporters.source import open_source
from ..progress import Progress
from ..tables import Table
from ..tools.console import print_table, working

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
def training(output: Path) -> Iterator[Progress]:
    """Progress of a training into ``output``. Ends the command in one line, with exit code 1, at an error of
    nestforge's and at ``output`` that cannot be written."""
    is_new = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        with working() as progress:
            yield progress
    except OSError as failure:
        _fail(OutputError(f"{failure.filename or output}: {failure.strerror}"))
    except NestforgeError as failure:
        if is_new and not any(output.iterdir()):
            output.rmdir()
        _fail(failure)


def _fail(failure: NestforgeError) -> None:
    click.echo(f"train: error: {failure}", err=True)
    raise SystemExit(1)


def demonstrate(steps: Callable[[], None]) -> int:
    """Runs ``steps`` and returns the exit code: a failure is one line, and that of a command its own exit code."""
    try:
        steps()
    except NestforgeError as failure:
        print(f"demo: error: {failure}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as failure:
        return failure.returncode
    return 0


def run(*command: str) -> None:
    """Runs a command, printed as one would type it. Raises CalledProcessError if it fails."""
    print(f"\n$ {shlex.join([Path(command[0]).name, *command[1:]])}", flush=True)
    subprocess.run(command, check=True)


def nestforge(*arguments: str) -> None:
    """Runs the ``nestforge`` of this environment. Raises CalledProcessError if it fails."""
    run(str(Path(sys.executable).with_name("nestforge")), *arguments)


def show(folder: Path, heading: str, tables: Mapping[str, Table]) -> None:
    """Prints ``tables`` under their titles, and writes them as the page ``report.md`` in ``folder``."""
    sections = [f"# {heading}"]
    for title, table in tables.items():
        print(f"\n{title}\n", flush=True)
        print_table(table.columns, table.rows)
        sections += [f"## {title}", table.markdown()]
    report = folder / "report.md"
    report.write_text("\n\n".join(sections) + "\n")
    print(f"\nThe tables as a page: {report.resolve()}")


def compile_once(model: Path, bundle: Path, *options: str) -> bool:
    """Compiles ``model``, unless ``bundle`` was made from these very files; whether it did."""
    if bundle.exists() and open_bundle(bundle).manifest.provenance.source != source_entries(open_source(model)):
        print(f"\n{bundle} was made from another model and is made anew")
        shutil.rmtree(bundle)
    if bundle.exists():
        print(f"\n{bundle} exists and is used again; remove it (rm -r {bundle}) to compile anew")
        return False
    nestforge("compile", short(model), *options, "--output", str(bundle))
    return True


def short(path: Path) -> str:
    """``path`` from here where it lies below, so that a printed command is readable."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
