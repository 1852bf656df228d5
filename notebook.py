"""Values as a notebook shows them: a title, names with what they stand for, and tables, as HTML.

All of it may come from files of others, so every text is made printable and escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .outside import printable

_MOST_ROWS = 64
_LONGEST = 400  # characters of a cell


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
