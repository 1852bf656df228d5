"""Where chat templates run: they are programs, and come with a model from anywhere.

Jinja's immutable sandbox keeps them from Python and from changing what they are given, and bounded_templates.py from
going on for ever. They get what transformers gives them (``utils/chat_template_utils.py``), but for a few filters, and
no more.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ...optional import needed
from .bounded_templates import bounded_environment, bounded_filter
from .template_allowance import require_dated, require_letters

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

# Earlier releases let templates out of the sandbox.
_OLDEST_JINJA = (3, 1, 6)
_INSTALL = "pip install 'nestforge[generate]'"


def sandbox() -> ImmutableSandboxedEnvironment:
    """An environment to compile and render a chat template in. Raises InputError where Jinja is missing or too old."""
    needed("jinja2", "chat template", f"Jinja2 ({_INSTALL})", "pass a prompt in place of a chat")
    if tuple(map(int, re.findall(r"\d+", version("jinja2"))[:3])) < _OLDEST_JINJA:
        oldest = ".".join(map(str, _OLDEST_JINJA))
        raise InputError(f"chat template: expected Jinja2 {oldest} or later, got {version('jinja2')}; {_INSTALL}")
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}`` marks what the model wrote, for training; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja has it)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class PlainNamespace(Namespace):
        """Without names that lead into Python."""

        def __init__(self, /, *arguments: Any, **values: Any) -> None:
            attributes = dict(*arguments, **values)
            for name in attributes:
                _check(name)
            super().__init__(attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            super().__setitem__(name, value)

        def __repr__(self) -> str:  # without what it holds, which may hold it
            return "<Namespace>"

    def _check(name: object) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace takes no name that begins with an underscore, got {name!r:.80}")

    # Parameters have transformers' names, by which templates may pass them.
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(format: str) -> str:
        require_dated(format)
        return datetime.now().strftime(format)

    environment = bounded_environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = bounded_filter("tojson", _to_json)
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, dict=_Dict(), namespace=PlainNamespace
    )
    return environment


class _Dict:
    """``dict`` to call, and not the type itself, whose attributes lead to others."""

    def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
        return dict(*arguments, **values)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


def _to_json(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape HTML."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts, count = [], 0
    for part in encoder.iterencode(value):
        count = require_letters(count + len(part))
        parts.append(part)
    return "".join(parts)
