"""How commands speak: results on stdout, as JSON, plain text or Rich; progress and remarks on stderr.

Everything goes through here, so that no name from a file drives the terminal or fakes a line.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ..outside import printable
from ..progress import Progress
from ..strict import unstructure
from .terminal_table import print_on_terminal

_NUMBER = re.compile(r"[-+]?\d[\d.,]*( ?%| ±[\d.]+)?|-|")


def say(text: str, err: bool = False) -> None:
    """One line on stdout, or on stderr; empty lines before and after it are kept."""
    before, after = len(text) - len(text.lstrip("\n")), len(text) - len(text.rstrip("\n"))
    click.echo("\n" * before + printable(text.strip("\n")) + "\n" * after, err=err)


def print_json(value: object) -> None:
    """Dataclasses, mappings, lists and scalars as JSON on stdout; null where a number is not finite."""
    text = json.dumps(_finite(unstructure(value)), indent=2, ensure_ascii=False, allow_nan=False)
    click.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Name and value, one a line, values aligned; on a terminal a long value goes on below its beginning."""
    width = max(len(name) for name, _ in facts)
    room = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else 0
    for name, value in facts:
        indented = f"{name:<{width}}  {printable(value)}"
        if len(indented) > room > 2 * width:
            wrap = textwrap.TextWrapper(
                room, subsequent_indent=" " * (width + 2), break_long_words=False, break_on_hyphens=False
            )
            for line in wrap.wrap(indented):
                say(line)
        else:
            say(indented)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], chosen: Collection[int] = ()) -> None:
    """A table on stdout: drawn with Rich on a terminal, aligned plain text when piped. Number columns align right;
    ``chosen`` are rows to colour."""
    columns, rows = list(map(printable, columns)), [list(map(printable, row)) for row in rows]
    numeric = [bool(rows) and all(_NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(columns))]
    if sys.stdout is not None and sys.stdout.isatty():
        print_on_terminal(columns, rows, numeric, chosen)
        return
    widths = [max([len(column), *(len(row[i]) for row in rows)]) for i, column in enumerate(columns)]
    for row in [columns, *rows]:
        cells = (cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(row, widths, numeric, strict=True))
        click.echo("  ".join(cells).rstrip())


def let_waiting_threads_sleep() -> None:
    """Of PyTorch, in a process that has not imported it yet, unless the environment says otherwise.

    Threads that spin while they wait took three times the processor's time of a compile where other programs wanted it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextlib.contextmanager
def working() -> Iterator[Progress]:
    """Runs a long job: yields its progress callback, and keeps what libraries print away from stdout."""
    with contextlib.redirect_stdout(sys.stderr):
        if sys.stderr is None or not sys.stderr.isatty():
            yield _plain_progress()
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars
        from rich.progress import TimeRemainingColumn as Left

        columns = (
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
            *(TextColumn("left"), Left()),
        )
        with Bars(*columns, console=Console(stderr=True)) as bars:
            tasks: dict[str, TaskID] = {}
            totals: dict[str, int] = {}

            def report(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage, total=total)
                parts = totals[stage] = max(total, totals.get(stage, 0))
                bars.update(tasks[stage], completed=parts if done >= total else done, total=parts)

            yield report


@contextlib.contextmanager
def resumable(output: Path) -> Iterator[None]:
    """An interruption says that the same command goes on, where there is something to go on with."""
    try:
        yield
    except KeyboardInterrupt:
        from ..compiler.work.staging import is_resumable

        hint = ["the same command goes on where this one was"] if is_resumable(output) else []
        raise KeyboardInterrupt(*hint) from None


def _finite(data: Any) -> Any:
    """``data`` with None for infinities and NaN, which JSON cannot say."""
    if isinstance(data, dict):
        return {key: _finite(item) for key, item in data.items()}
    if isinstance(data, list):
        return [_finite(item) for item in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _plain_progress() -> Progress:
    totals: dict[str, int] = {}
    finished: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        parts = totals[stage] = max(total, totals.get(stage, 0))
        if done >= total and stage not in finished:
            finished.add(stage)
            with contextlib.suppress(OSError):  # no reason to stop the job
                click.echo(f"{stage}: {parts}/{parts}", err=True)

    return report
