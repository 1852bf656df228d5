"""A table on a terminal: no cell is broken where the columns can be shown in two tables, one below the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

# Longer cells of several words may break between these.
_LONGEST_UNBROKEN = 24
# What a column takes beside its cells, and a table beside its columns.
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
    """What the heading's words and cells take that are not broken."""
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
