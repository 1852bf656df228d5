"""The parts of the reference pages that follow from the code: ``make pages`` writes them, a test holds the pages to it.

A page marks such a part by a comment and everything up to ``<!-- end -->`` is replaced: ``<!-- commands -->``,
``<!-- command NAME -->``, ``<!-- shared -->``, ``<!-- names -->``, ``<!-- options MODULE.NAME -->``, of a dataclass or
function. In a table behind ``<!-- fields MODULE.CLASS -->`` names and types of fields follow from the dataclass, and
their meaning stays as the page has it.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from .. import _HOMES, __all__
from ..argument_types import options_of
from ..profiles.backends import BACKENDS, BackendName
from ..profiles.precision import Precision
from ..tools.cli import COMMANDS, main

DOCS = Path(__file__).parent
PAGES = ("cli.md", "python-api.md", "bundle-format.md")
_PART = re.compile(r"<!-- (commands|command|shared|names|options) ?(\S*) -->\n.*?<!-- end -->", re.DOTALL)
# Names of a table that grows: a page says where they are, so that one more changes no page but its own.
_TABLES = {BackendName: "text, a [back end](install.md)", Precision: "text, a [precision](precision.md)"}
_TABLE = re.compile(r"<!-- fields (\S+) -->\n\|[^\n]*\n\|[^\n]*\n((?:\|[^\n]*\n)*)")


def page(text: str) -> str:
    """A page with its parts made anew."""
    text = _PART.sub(lambda part: f"{part[0].splitlines()[0]}\n{_MAKERS[part[1]](part[2])}\n<!-- end -->", text)
    return _TABLE.sub(lambda table: _table(table, text), text)


def _commands(_: str) -> str:
    rows = [
        f"| [`{name}`](#{name}) | {_command_of(name).get_short_help_str(200).removesuffix('.')} |" for name in COMMANDS
    ]
    return "\n".join(["| command | purpose |", "|---|---|", *rows])


def _shared(_: str) -> str:
    """Options that several commands have, each stated once."""
    rows = []
    for (flag, meaning), names in _SHARED.items():
        takers = "all" if len(names) == len(COMMANDS) else ", ".join(f"`{name}`" for name in names)
        rows.append(f"| `{flag}` | {meaning} | {takers} |")
    return "\n".join(["| option | meaning | commands |", "|---|---|---|", *rows])


def _command(name: str) -> str:
    examples = inspect.cleandoc(_command_of(name).epilog or "").partition("Examples:\n")[2].splitlines()
    shown = ["```sh", inspect.cleandoc(examples[0]), "```"]
    own = [f"| `{flag}` | {meaning} |" for flag, meaning in _rows(name) if (flag, meaning) not in _SHARED]
    return "\n".join([*shown, *(["", "| option | meaning |", "|---|---|", *own] if own else [])])


def _rows(name: str) -> list[tuple[str, str]]:
    """Flags and meaning of a command's options, as its help has them."""
    command = _command_of(name)
    context = click.Context(command, info_name=f"nestforge {name}")
    options = [each for each in command.params if isinstance(each, click.Option)]
    records = [record for each in options if (record := each.get_help_record(context))]
    backends = f"[{'|'.join(BACKENDS)}]"
    return [(_cell(flag.replace(backends, "NAME")), _cell(meaning)) for flag, meaning in records]


def _shared_rows() -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for name in COMMANDS:
        for row in _rows(name):
            found.setdefault(row, []).append(name)
    return {row: names for row, names in sorted(found.items()) if len(names) > 1}


def _names(_: str) -> str:
    rows = []
    for name in __all__:
        if name in _HOMES:
            module, attribute = _HOMES[name]
            said = inspect.getdoc(getattr(import_module(f"nestforge.{module}"), attribute)) or ""
            first = re.split(r"(?<=[a-z`)])[.:;]\s", " ".join(said.split()), maxsplit=1)[0].rstrip(".")
            rows.append(f"| `{name}` | {_cell(first.replace('``', '`'))} | `{module}` |")
    return "\n".join(["| name | purpose | module |", "|---|---|---|", *rows])


def _options(name: str) -> str:
    owner = _class(name)
    rows = [
        f"| `{name}` | `{_cell(str(owner.__annotations__[name]))}` | {_default(field)} | {_cell(_help(field))} |"
        for name, field in options_of(owner).items()
        if "help" in field.metadata
    ]
    return "\n".join(["| argument | type | default | meaning |", "|---|---|---|---|", *rows])


def _help(field: Field[Any]) -> str:
    bounds = {"min": "at least {}", "above": "above {}", "max": "at most {}"}
    stated = [text.format(field.metadata[key]) for key, text in bounds.items() if key in field.metadata]
    return f"{field.metadata['help']} {', '.join(stated).capitalize()}{'.' if stated else ''}".strip()


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "required" if field.default_factory is MISSING else f"`{field.default_factory()!r}`"
    return f"`{getattr(field.default, '__name__', repr(field.default))}`"


def _table(table: re.Match[str], text: str) -> str:
    """The table of a dataclass; the meaning of each field is the one it had."""
    owner = _class(table[1])
    meanings = {}
    for row in table[2].splitlines():
        name, _, meaning = row.strip("|").split(" | ", 2)
        meanings |= dict.fromkeys(re.findall(r"`(\w+)`", name), meaning.strip())  # several may share a row
    hints = get_type_hints(owner)
    own = {found[1] for found in _TABLE.finditer(text)}
    rows = []
    for field in fields(owner):
        shown = _type(hints[field.name], field.metadata, own)
        rows.append(f"| `{field.name}`{_mark(field, hints)} | {shown} | {meanings.get(field.name, '')} |")
    return "\n".join([f"<!-- fields {table[1]} -->", "| field | type | meaning |", "|---|---|---|", *rows, ""])


def _mark(field: Field[Any], hints: Mapping[str, Any]) -> str:
    """A question mark behind a field that may be left out."""
    is_stated = field.default is MISSING and field.default_factory is MISSING
    return "" if is_stated and types.NoneType not in get_args(hints[field.name]) else "?"


def _type(hint: Any, bounds: Mapping[str, Any], own: set[str]) -> str:
    """A type as the page names it: ``list of text``."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(one, bounds, own) for one in inner if one is not type(None))
    if hint in _TABLES:
        return _TABLES[hint]
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin is tuple:
        found = _type(inner[0], bounds, own)
        return f"list of {found.replace('whole number', 'whole numbers', 1 if found.startswith('whole') else 0)}"
    if origin is not None and issubclass(origin, Mapping):
        return f"{_type(inner[1], bounds, own)}, by name"
    if is_dataclass(hint):
        if f"{hint.__module__.removeprefix('nestforge.')}.{hint.__name__}" in own:
            return f"`{hint.__name__}`"
        hints = get_type_hints(hint)
        return f"{{{', '.join(f'`{f.name}`{_mark(f, hints)}' for f in fields(hint))}}}"
    least = f", at least {bounds['min']}" if "min" in bounds and hint in (int, float) else ""
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any"}
    return f"{names.get(hint, str(hint))}{least}"


def _class(name: str) -> Any:
    """The object that ``MODULE.NAME`` or ``MODULE.CLASS.METHOD`` names."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(f"nestforge.{module}"), attribute)
    except ModuleNotFoundError:
        return getattr(_class(module), attribute)


def _command_of(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


_SHARED = _shared_rows()
_MAKERS: dict[str, Callable[[str], str]] = {
    "commands": _commands,
    "command": _command,
    "shared": _shared,
    "names": _names,
    "options": _options,
}


if __name__ == "__main__":
    for name in PAGES:
        path = DOCS / name
        path.write_text(page(path.read_text()))
