"""Text of a row as its tokens come, in pieces that later tokens cannot change, up to where it stops: at an end id, or
before a stop string, which no piece given out may have begun.

The text of a token depends on its neighbours: a letter may be spread over several tokens, the first word of a text has
no space before it. So a few tokens before the new one are decoded with it, and what they gave already is left out.
Held back are

* an incomplete letter: what a byte-level decoder shows as U+FFFD at the end, until it is complete or cannot become so;
* a run of byte tokens (``<0xE2>``), until it ends: a byte-fallback decoder shows the whole run as U+FFFD if any part of
  it is not UTF-8. (``tokenizers.decoders.DecodeStream`` gives its letters out and fails when they change.)
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import BundleCorruptError, InputError
from ...outside import is_of_library, library_errors, said_by
from ..inputs.text import require_characters

_MOST_STRINGS, _MOST_LETTERS = 64, 1024
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_INCOMPLETE = "\ufffd"
# Tokens that are decoded again with each new one.
_WINDOW = 16
_PIECEWISE = frozenset(
    {"BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
)


@dataclass(frozen=True)
class Stops:
    """``ids`` end the row with their token, which adds no text; ``strings`` end it where one of them is complete, and
    the text ends before it. Raises InputError."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if below := [token for token in self.ids if token < 0]:
            raise InputError(f"stop ids: expected whole numbers, 0 or above, got {min(below)!r:.80}")
        if len(self.strings) > _MOST_STRINGS:
            raise InputError(f"stop strings: expected at most {_MOST_STRINGS}, got {len(self.strings)}")
        for text in self.strings:
            if not 0 < len(text) <= _MOST_LETTERS:
                raise InputError(f"stop strings: expected texts of 1 to {_MOST_LETTERS} letters, got {text!r:.80}")
            require_characters(f"stop strings: {text!r:.80}", text)


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
        """The part of the held text and ``text`` that is before a stop string and cannot be the beginning of one."""
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


class Detokenizer:
    """Text of one row. The pieces joined are the decoded tokens, special ones left out.

    With a ``context`` (the tokens before, a prompt that is continued) they are what the tokens add to its text: the
    first piece then has the space that parts it from the prompt, where decoded alone it would have none.
    """

    def __init__(self, tokenizer: Any, context: Iterable[int] = ()) -> None:
        """``tokenizer`` is a ``tokenizers.Tokenizer``. Raises InputError for one whose decoder changes what earlier
        tokens gave, BundleCorruptError for one that cannot decode."""
        self._tokenizer = tokenizer
        with library_errors(_undecodable):
            added = tokenizer.get_added_tokens_decoder()
            state = tokenizer.decoder.__getstate__() if tokenizer.decoder else b"null"
        _check_piecewise(json.loads(state))
        self._special = {number for number, token in added.items() if token.special}
        self._window: list[int] = []  # begins where nothing was held back
        self._in_bytes = False
        for token in context:
            self._append(token)
        self._complete = len(self._window)  # how many of them there were when nothing was held back
        text = self._decoded()
        self._given = len(text.rstrip(_INCOMPLETE) if self._in_bytes else text.removesuffix(_INCOMPLETE))

    def add(self, token: int) -> str:
        """The text that is certain now; often of ``token``, sometimes empty, sometimes of several tokens."""
        if not self._append(token) or self._in_bytes:
            return ""
        text = self._decoded()
        certain = text.removesuffix(_INCOMPLETE)
        piece = certain[self._given :]
        self._given = len(certain)
        if len(certain) == len(text):
            self._move()
        return piece

    def finish(self) -> str:
        """The text still held back, as it is decoded without tokens behind it. Nothing may be added after it."""
        return self._decoded()[self._given :]

    def _append(self, token: int) -> bool:
        """Whether the token has a text: ids that are special or without a token have none, and ``decode`` leaves them
        out."""
        name = None if token in self._special else self._tokenizer.id_to_token(token)
        if name is None:
            return False
        self._window.append(token)
        self._in_bytes = _BYTE_TOKEN.fullmatch(name) is not None
        return True

    def _move(self) -> None:
        """Leaves out tokens of the window's beginning if it is long; what remains has a text of its own, so that a
        decoder that strips the first space has stripped it there."""
        if len(self._window) > _WINDOW:
            rest = self._window[self._complete :]
            if given := len(self._decoded(rest)):
                self._window, self._given = rest, given
        self._complete = len(self._window)

    def _decoded(self, tokens: list[int] | None = None) -> str:
        try:  # library_errors takes as long as the decoding
            text: str = self._tokenizer.decode(self._window if tokens is None else tokens, skip_special_tokens=True)
        except BaseException as failure:
            if not is_of_library(failure):
                raise
            raise _undecodable(said_by(failure)) from failure
        return text


def _undecodable(said: str) -> BundleCorruptError:
    return BundleCorruptError(f"tokenizer: cannot decode ({said})")


def _check_piecewise(decoder: Mapping[str, Any] | None) -> None:
    """Raises InputError unless the text of some tokens begins the text of those and more."""
    fused = False
    for step in _steps(decoder):
        kind = step["type"]
        fused |= kind == "Fuse"
        across = kind == "Replace" and fused and len(step["pattern"].get("String", "  ")) > 1
        if kind not in _PIECEWISE or across or (kind == "Strip" and step["stop"]):
            raise InputError(
                f"tokenizer: expected a decoder whose text only grows with every token, got {json.dumps(step):.120}; "
                "its tokens can be decoded together, not as they come"
            )


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is not None and decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    elif decoder is not None:
        yield decoder
