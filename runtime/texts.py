"""Texts of requests as a bundle's tokenizer makes inputs of them; it is opened when the first text comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property

from ..bundle.manifest import TextEntry
from ..bundle.open_bundle import Bundle
from ..errors import InputError
from .inputs.text import Encoded, TextEncoder

# Texts whose tokens are counted at a time.
_COUNTED_AT_ONCE = 256


class Texts:
    """Thread-safe. All of it raises InputError where the bundle has no tokenizer."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._lock = threading.Lock()

    def prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        """What stands before a text of a request with these arguments; empty for nothing. Raises InputError."""
        return self._entry().prompt(prompt, prompt_name)

    def token_counts(self, texts: Sequence[str], prompt: str | None) -> list[int]:
        """How many tokens each of ``texts`` has behind ``prompt``, with those that the tokenizer adds."""
        encoder = self.encoder()
        counts: list[int] = []
        for start in range(0, len(texts), _COUNTED_AT_ONCE):
            counts += encoder.lengths(texts[start : start + _COUNTED_AT_ONCE], prompt)
        return counts

    def encode(
        self,
        inputs: str | Sequence[str],
        longest: Callable[[int], int],
        truncate: bool,
        prompt: str | None,
        prompt_name: str | None,
    ) -> tuple[Encoded, str]:
        """Texts as inputs, and the prompt before them; ``longest(rows)`` is the longest sequence for so many rows."""
        if not isinstance(inputs, (str, Sequence)):
            raise InputError(f"inputs: expected arrays by name, a text or texts, got {type(inputs).__name__}")
        texts = [inputs] if isinstance(inputs, str) else inputs
        encoder = self.encoder()
        before = encoder.entry.prompt(prompt, prompt_name)
        return encoder.encode(texts, longest(max(1, len(texts))), truncate, before), before

    def encoder(self) -> TextEncoder:
        """The tokenizer as the bundle uses it."""
        with self._lock:
            return self._opened

    @cached_property
    def _opened(self) -> TextEncoder:
        text = self._entry()
        self._bundle.require_hashes(text.file)
        with self._bundle.held(text.file):
            return TextEncoder(self._bundle.file(text.file), text, self._bundle.manifest.inputs)

    def _entry(self) -> TextEntry:
        text = self._bundle.manifest.text
        if text is None:
            raise InputError(f"bundle {self._bundle.path}: has no tokenizer; pass arrays by input name instead of text")
        return text
