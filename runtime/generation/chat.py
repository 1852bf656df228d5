"""A chat as the prompt that its model was trained on: the chat template of the tokenizer's folder, rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from ...outside import library_errors
from .bounded_templates import allowance, bounded_tree
from .sandbox import sandbox
from .template_allowance import require_letters

# Of a template. Those with tools and reasoning have some ten thousand.
MAX_TEMPLATE_LETTERS = 2**18


class ChatTemplate:
    """A template that is ready to render. Thread-safe.

    What a user writes may spell the template's own marks (``<|im_end|>``): the tokenizer makes the same tokens of both,
    as with transformers. Time and letters of a rendering are bounded (template_allowance.py).
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
