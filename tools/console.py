"""Output of commands: results on stdout, as JSON, plain text or Rich; progress and remarks on stderr.

Everything goes through here, so that no name from a file drives the terminal or fakes a line.
"""

import ast
import contextlib
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import click

from ..outside import printable
from ..progress import Bytes, Progress
from ..strict import finite, unstructure
from ..tables import Table

# A part of what a command says: a table, facts, a line, or several of these without an empty line between them.
Block = str | Table | Sequence["Block"]
# Seconds between lines of a log about a stage that takes long; share done from which the time left is estimated.
_SECONDS_BETWEEN_LINES, _LEAST_SHARE_JUDGED = 30.0, 0.05
_NUMBER = re.compile(r"[-+]?\d[\d.,]*( ?%| ±[\d.]+)?|-|")


def say(text: str, err: bool = False) -> None:
    """One line on stdout, or on stderr; empty lines before and after it are kept."""
    before, after = len(text) - len(text.lstrip("\n")), len(text) - len(text.rstrip("\n"))
    click.echo("\n" * before + printable(text.strip("\n")) + "\n" * after, err=err)


def print_json(value: object) -> None:
    """Dataclasses, mappings, lists and scalars as JSON on stdout; null where a number is not finite."""
    text = json.dumps(finite(unstructure(value)), indent=2, ensure_ascii=False, allow_nan=False)
    click.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def show(as_json: bool, data: object, report: Callable[[], Iterable[Block]]) -> None:
    """``data`` as JSON, or for people what ``report`` says of it: its parts with an empty line between two."""
    if as_json:
        print_json(data)
        return
    for number, block in enumerate(report()):
        if number:
            click.echo()
        _print_block(block)


def _print_block(block: Block) -> None:
    if isinstance(block, str):
        say(block)
    elif not isinstance(block, Table):
        for part in block:
            _print_block(part)
    elif any(block.columns):
        print_table(block.columns, block.rows, block.chosen)
    else:
        print_facts(block.rows)


def print_facts(facts: Sequence[Sequence[str]]) -> None:
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
    """Lets PyTorch's waiting threads sleep, in a process that has not imported it yet, unless the environment says
    otherwise.

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
        from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars
        from rich.progress import TimeRemainingColumn as Left

        columns = (
            *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn()),
            *(TextColumn("left"), Left()),
        )
        # Parts of a stage take unequal time: what is left follows from all of it, not from its last seconds.
        with Bars(*columns, console=Console(stderr=True), speed_estimate_period=3600) as bars:
            stages: dict[str, tuple[_Stage, TaskID]] = {}

            def report(name: str, done: float, total: int) -> None:
                if name not in stages:
                    stages[name] = _Stage(), bars.add_task(name, total=1.0, count="")
                stage, task = stages[name]
                stage.report(done, total)
                bars.update(task, completed=stage.share, count=stage.count)

            yield report


class _Stage:
    """How far a stage is: the largest ``share`` reported, 0 to 1, in the finest parts that it was counted in."""

    def __init__(self) -> None:
        self.share, self._parts = 0.0, 0
        self.began = self.said = time.monotonic()

    def report(self, done: float, total: int) -> None:
        """``done`` of ``total`` parts."""
        self._parts = max(self._parts, total)
        self.share = max(self.share, 1.0 if done >= total else done / total)

    @property
    def count(self) -> str:
        """The parts that are done, of all."""
        done = self.share * self._parts + 1e-9
        if isinstance(self._parts, Bytes):
            return f"{done / 1e6:,.1f}/{self._parts / 1e6:,.1f} MB"
        return f"{int(done)}/{self._parts}"


@contextlib.contextmanager
def resumable(output: Path) -> Iterator[None]:
    """An interruption says that the same command goes on, where there is something to go on with."""
    try:
        yield
    except KeyboardInterrupt:
        from ..compiler.work.staging import is_resumable

        hint = ["the same command goes on where this one was"] if is_resumable(output) else []
        raise KeyboardInterrupt(*hint) from None


def _plain_progress() -> Progress:
    """A line for each stage that is done, and for one that takes long, where it is from time to time."""
    stages: dict[str, _Stage] = {}
    finished: set[str] = set()

    def report(name: str, done: float, total: int) -> None:
        stage, now = stages.setdefault(name, _Stage()), time.monotonic()
        stage.report(done, total)
        line = None
        if stage.share == 1 and name not in finished:
            finished.add(name)
            line = f"{name}: {stage.count}"
        elif 0 < stage.share < 1 and now - stage.said >= _SECONDS_BETWEEN_LINES:
            left = (now - stage.began) * (1 / stage.share - 1)
            line = f"{name}: {stage.share:.0%} ({stage.count})"
            line += f", about {left:,.0f} s left" if stage.share >= _LEAST_SHARE_JUDGED else ""
        if line is not None:
            stage.said = now
            with contextlib.suppress(OSError):  # no reason to stop the job
                click.echo(line, err=True)

    return report


# Longer cells of several words may break between these.
_LONGEST_UNBROKEN = 24
# Width of a column beside its cells, and of a table beside its columns.
_BESIDE, _FRAME = 3, 1
_CHOSEN, _NOISY = "bold green", "yellow"


def print_on_terminal(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool], chosen: Collection[int]
) -> None:
    """Draws ``rows`` with Rich as wide as the terminal; where they are wider, the columns that are left follow in
    further tables, behind the first column again."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    cells = [[column, *(row[i] for row in rows)] for i, column in enumerate(columns)]
    least, most = [_least_width(column) for column in cells], [max(map(len, column)) for column in cells]
    for group in _groups(least, console.width - _FRAME):
        table = Table()
        widths = _widths([least[i] for i in group], [most[i] for i in group], console.width - _FRAME)
        for i, width in zip(group, widths, strict=True):
            table.add_column(columns[i], justify="right" if numeric[i] else "left", overflow="fold", width=width)
        for number, row in enumerate(rows):
            style = _CHOSEN if number in chosen else ""
            table.add_row(*(Text(row[i], style=_style(columns[i], row[i]) or (style if i == 0 else "")) for i in group))
        console.print(table)


def _least_width(cells: Sequence[str]) -> int:
    """Width of the heading's words and of cells that are not broken."""
    heading, *others = cells
    whole = heading.split()
    for cell in others:
        whole += [cell] if len(cell) <= _LONGEST_UNBROKEN else cell.split()
    return max(map(len, whole), default=1)


def _groups(least: Sequence[int], room: int) -> list[list[int]]:
    """Columns by table, the first one in each."""
    groups = [[0]]
    left = room - least[0] - _BESIDE
    for i, width in enumerate(least[1:], 1):
        if width + _BESIDE > left and len(groups[-1]) > 1:
            groups.append([0])
            left = room - least[0] - _BESIDE
        groups[-1].append(i)
        left -= width + _BESIDE
    return groups


def _widths(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """The least of each column, and what is left to those that could use it, the narrowest want first."""
    widths = list(least)
    left = room - sum(widths) - _BESIDE * len(widths)
    for i in sorted(range(len(widths)), key=lambda i: most[i] - least[i]):
        more = max(0, min(left, most[i] - widths[i]))
        widths[i] += more
        left -= more
    if left < 0:  # one column beside the first that is wider than the terminal: that one folds
        widths[-1] = max(1, widths[-1] + left)
    return widths


def _style(column: str, cell: str) -> str:
    if cell == "chosen":
        return _CHOSEN
    return _NOISY if cell.endswith(" noisy") or (column, cell) == ("noisy", "yes") else ""


_SETTING = re.compile(r"`([a-z][a-z_]*)(?:=([^`]*))?`")


def in_options(text: str) -> str:
    """``text`` with every setting in it as an option: `` `truncate=True` `` as `` `--truncate` ``."""
    context = click.get_current_context(silent=True)
    if context is None or not _SETTING.search(text):
        return text
    options = options_of(context.find_root())
    return _SETTING.sub(lambda found: _option(found, options), text)


def options_of(root: click.Context) -> dict[str, click.Option]:
    """The options of all commands by the name of the setting; of several that have it that of the one which runs."""
    group, options = root.command, dict[str, click.Option]()
    names = group.list_commands(root) if isinstance(group, click.Group) else []
    for name in sorted(names, key=lambda name: name != root.invoked_subcommand):
        command = group.get_command(root, name) if isinstance(group, click.Group) else None
        for parameter in command.params if command else ():
            if isinstance(parameter, click.Option) and parameter.name is not None and not parameter.hidden:
                options.setdefault(parameter.name, parameter)
    return options


def _option(found: re.Match[str], options: dict[str, click.Option]) -> str:
    name, value = found[1], found[2]
    option = options.get(name)
    if option is None:
        return found[0]
    if value == "None" or (value == "False" and not option.secondary_opts):
        return f"no `{option.opts[-1]}`"
    flag = (option.secondary_opts if value == "False" else option.opts)[-1]
    return f"`{flag}`" if value is None or option.is_flag else f"`{' '.join(f'{flag} {one}' for one in _words(value))}`"


def _words(value: str) -> list[str]:
    """A value as words of the command line: ``'levels'`` without quotes, an entry of a mapping as ``KEY=VALUE``."""
    try:
        read = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # a message may quote what a file says
        return [value]
    if isinstance(read, dict):
        return [f"{key}={one}" for key, one in read.items()]
    return [str(one) for one in read] if isinstance(read, (list, tuple)) else [read if isinstance(read, str) else value]
