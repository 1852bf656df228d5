"""What the library says, in the words of the command line.

Errors, notes and reasons of the library name a setting as Python has it, in backquotes: `` `truncate=True` ``,
`` `latency_ms` ``. Here such a name becomes the option of the command that says it, else of another command.
"""

from __future__ import annotations

import ast
import re

import click

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
    flag = (option.secondary_opts if value == "False" and option.secondary_opts else option.opts)[-1]
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
