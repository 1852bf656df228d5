"""Tables of text as commands, pages and notebooks show them; as HTML all of it is made printable and escaped, since it
may come from files of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from .outside import printable

T = TypeVar("T")
_MOST_ROWS = 64
_LONGEST = 400  # characters of a cell


@dataclass(frozen=True)
class Table:
    """Column headings, with units, and rows of text. ``chosen`` are the rows that a budget chose, by number."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    chosen: Sequence[int] = ()

    @classmethod
    def of(cls, items: Iterable[T], cells: Mapping[str, Callable[[T], object]]) -> Table:
        """A row an item: the text of what each of ``cells``, by heading, has of it."""
        return cls([*cells], [[str(cell(item)) for cell in cells.values()] for item in items])

    @classmethod
    def facts(cls, facts: Iterable[tuple[str, str]]) -> Table:
        """A name and a value a row, without headings."""
        return cls(("", ""), list(facts))

    def markdown(self) -> str:
        rows: list[Sequence[str]] = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def as_html(
    title: str,
    facts: Sequence[tuple[str, object]] = (),
    columns: Sequence[str] = (),
    rows: Sequence[Sequence[object]] = (),
) -> str:
    """HTML of ``title``, of each of ``facts``, and of a table with ``columns`` whose ``rows`` are cut to 64."""
    lines = [f"<div><strong>{_text(title)}</strong>"]
    if facts:
        lines += ["<table>", *(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts)]
        lines.append("</table>")
    if columns:
        lines += ["<table>", _row("th", columns), *(_row("td", row) for row in rows[:_MOST_ROWS]), "</table>"]
        if len(rows) > _MOST_ROWS:
            lines.append(f"<p>and {len(rows) - _MOST_ROWS} more</p>")
    return "\n".join([*lines, "</div>"])


def _row(kind: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{kind}>{_text(cell)}</{kind}>' for cell in cells)}</tr>"


def _text(value: object) -> str:
    return escape(printable(str(value), _LONGEST))
