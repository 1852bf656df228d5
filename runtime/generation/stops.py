"""Where a row's text ends: at an end id, or before a stop string, which no piece given out may have begun."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ...errors import InputError
from .detokenizer import Detokenizer

_MOST_STRINGS = 64
_MOST_LETTERS = 1024
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Stops:
    """``ids`` end the row with their token, which adds no text; ``strings`` end it where one of them is complete, and
    the text ends before it. Raises InputError."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", frozenset(_checked_ids(self.ids)))
        object.__setattr__(self, "strings", tuple(_checked_strings(self.strings)))


class TextStream:
    """Text of one row as its tokens come.

    The pieces joined are the text up to the stop. The stop string that is complete first ends the row, whatever tokens
    spell it; of several that end at one letter the longest.
    """

    def __init__(self, tokenizer: Any, stops: Stops, context: Iterable[int] = ()) -> None:
        """``context``: tokens before the row's own, see Detokenizer; stop strings are not looked for in their text."""
        self._stops = stops
        self._detokenizer = Detokenizer(tokenizer, context)
        self._held = ""  # certain, but perhaps the beginning of a stop string
        self._stopped: int | str | None = None
        self._finished = False

    @property
    def stopped(self) -> int | str | None:
        """The end id or stop string that ended the row."""
        return self._stopped

    def add(self, token: int) -> str:
        """The text that may be given out now; all the rest if this token ends the row, which ``stopped`` then says."""
        assert not self._finished, "the row has ended"
        if token not in self._stops.ids:
            return self._certain(self._detokenizer.add(token))
        rest = self.finish()
        if self._stopped is None:
            self._stopped = token
        return rest

    def finish(self) -> str:
        """The rest, where the row ends for another reason; a stop string that is complete in it still ends the row."""
        if self._finished:
            return ""
        text = self._certain(self._detokenizer.finish()) + self._held
        self._finished = True
        return text

    def _certain(self, text: str) -> str:
        """What of the held text and ``text`` lies before the stop string, or cannot be the beginning of one."""
        strings, text = self._stops.strings, self._held + text
        ends = [(place + len(stop), place, stop) for stop in strings if (place := text.find(stop)) >= 0]
        if ends:
            _, certain, self._stopped = min(ends)
            self._finished, self._held = True, ""
        else:
            longest = min(len(text), max(map(len, strings), default=1) - 1)
            begins = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in strings))
            certain = len(text) - next(begins, 0)
            self._held = text[certain:]
        return text[:certain]


def _checked_ids(ids: object) -> Iterator[int]:
    for token in _several("stop ids", ids):
        if not isinstance(token, Integral) or isinstance(token, bool) or token < 0:
            raise InputError(f"stop ids: expected whole numbers, 0 or above, got {token!r:.80}")
        yield int(token)


def _checked_strings(strings: object) -> Iterator[str]:
    several = _several("stop strings", strings)
    if len(several) > _MOST_STRINGS:
        raise InputError(f"stop strings: expected at most {_MOST_STRINGS}, got {len(several)}")
    for text in several:
        if not isinstance(text, str) or not 0 < len(text) <= _MOST_LETTERS:
            raise InputError(f"stop strings: expected texts of 1 to {_MOST_LETTERS} letters, got {text!r:.80}")
        if _SURROGATE.search(text):
            raise InputError(f"stop strings: half of a surrogate pair, which is no character, in {text!r:.80}")
        yield text


def _several(name: str, values: object) -> tuple[object, ...]:
    if not isinstance(values, Collection) or isinstance(values, str | bytes | Mapping):
        raise InputError(f"{name}: expected a list, got {values!r:.80}")
    return tuple(values)
