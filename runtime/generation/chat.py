"""A chat as the prompt that its model was trained on: the chat template of the tokenizer's folder, rendered."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ...optional import needed
from ...outside import library_errors
from .bounded_templates import (
    allowance,
    bounded_environment,
    bounded_filter,
    bounded_tree,
    require_dated,
    require_letters,
)

# Length of a template. Those with tools and reasoning have some ten thousand.
MAX_TEMPLATE_LETTERS = 2**18


class ChatTemplate:
    """A template that is ready to render. Thread-safe.

    A user's text may spell the template's own marks (``<|im_end|>``): the tokenizer makes the same tokens of both,
    as with transformers. Time and letters of a rendering are bounded (bounded_templates.py).
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: what the template calls ``bos_token``, ``eos_token`` and the like.

        Raises InputError for a text that is not a template or too long, or where Jinja is missing.
        """
        if len(source) > MAX_TEMPLATE_LETTERS:
            raise InputError(f"chat template: expected at most {MAX_TEMPLATE_LETTERS} letters, got {len(source)}")
        environment = sandbox()
        with library_errors(lambda said: InputError(f"chat template: cannot be compiled ({said})")):
            self._template = environment.from_string(bounded_tree(environment, source))
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a chat, from its first message ``{"role": ..., "content": ...}`` to its last.

        ``add_generation_prompt`` ends it with what the model's answer comes behind. The prompt has its special tokens
        in it: encode it without adding others.
        Raises InputError for messages that are not of that form, or that the template refuses.
        """
        chat = [_message(number, message) for number, message in enumerate(_several(messages))]
        given = {"messages": chat, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        refusal = "chat template: cannot render this chat"
        with library_errors(lambda said: InputError(f"{refusal} ({said})")), allowance() as allowed:
            pieces, count = [], 0
            for piece in allowed.each(self._template.generate(self._special_tokens, **given)):
                count = require_letters(count + len(piece))
                pieces.append(piece)
            return "".join(pieces)


def _several(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InputError(f"chat: expected a list of messages, at least one, got {messages!r:.80}")
    return messages


def _message(number: int, message: Any) -> dict[str, str]:
    keys = ("role", "content")
    fits = isinstance(message, Mapping) and set(message) == set(keys)
    if not fits or not all(isinstance(message[key], str) for key in keys):
        raise InputError(
            f"chat: message {number}: expected {{'role': text, 'content': text}} and no other key, got {message!r:.80}"
        )
    return {key: str.__str__(message[key]) for key in keys}  # a subclass would bring its methods into the sandbox


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
