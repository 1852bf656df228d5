"""The allowance of one rendering of a chat template: time of the processor, and the size of what it makes.

Sizes are in letters. A list, tuple or dict counts the letters of all its elements, each as often as it stands there,
and some for each element: so a list that doubles itself grows as what is written of it does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from time import thread_time
from typing import Any, TypeVar

MOST_SECONDS = 5.0
# Letters of one value, or of the prompt. The longest contexts of language models have a few million letters.
MOST_LETTERS = 2**22
# Letters of all values that are made, kept or not.
MOST_LETTERS_IN_ALL = 2**27
_LETTERS_OF_ELEMENT = 16
_MOST_BITS = 2**12

Value = TypeVar("Value")
# Fields of the two kinds of formats, those whose width is a value itself, and numbers by their first digits. None tries
# a text of n letters in n ways, which would take hours of a long one.
_FIELD = {"%": re.compile(r"%(?:\([^()]*\))?[#0\- +]*[\d*.]*"), "{": re.compile(r"\{[^{}]*")}
_WIDTH_OF_VALUE = {"%": re.compile(r"%(?:\([^()]*\))?[#0\- +\d.]*\*"), "{": re.compile(r"\{[^{}:]*:[^{}]*\{")}
_NUMBER = re.compile(r"0*(\d{1,9})\d*")
# A width in the format of a date, behind its flags, by its first digits.
_DATE_WIDTH = re.compile(r"%[_\-^#+0]*(\d{1,9})")


class Allowance:
    """The allowance of one rendering, in one thread. Every method raises ValueError for what is beyond it."""

    def __init__(self) -> None:
        self._end = thread_time() + MOST_SECONDS
        self._left = MOST_LETTERS_IN_ALL

    def step(self) -> bool:
        """To be asked in every loop; True, so that it may stand in a condition."""
        if thread_time() > self._end:
            raise ValueError(f"it takes more than {MOST_SECONDS:g} s of the processor")
        return True

    def made(self, value: Value) -> Value:
        """``value``, which the template made."""
        self.step()
        size = require_letters(letters_of(value))
        self._left -= size
        if self._left < 0:
            raise ValueError(f"it makes more than {MOST_LETTERS_IN_ALL} letters in all")
        return value

    def each(self, values: Iterable[Value]) -> Iterator[Value]:
        """``values``, each made when it is asked for."""
        for value in values:
            yield self.made(value)


def letters_of(value: object) -> int:
    """The size of ``value``. Raises ValueError for a whole number of more digits than any text needs."""
    return _letters_of(value, {})


def require_letters(count: int) -> int:
    """``count`` of a value that is there, or is about to be made. Raises ValueError for too many."""
    if count > MOST_LETTERS:
        raise ValueError(f"it makes a value of {count} letters, more than {MOST_LETTERS}")
    return count


def require_numbers(values: Iterable[object]) -> None:
    """Raises ValueError for a whole number among arguments that a text may not be as long as."""
    for value in values:
        if isinstance(value, int) and abs(value) > MOST_LETTERS:
            raise ValueError(f"it asks for {value:.3g} of something, more than {MOST_LETTERS}")


def require_replaced(text: str, old: object, new: object) -> None:
    """Raises ValueError where ``text`` with every ``old`` as ``new`` would be too long."""
    if isinstance(old, str) and isinstance(new, str):
        require_letters(len(text) + text.count(old) * len(new))


def require_searched(text: str, sought: object) -> None:
    """Raises ValueError where it would take too long to compare every letter of ``text`` with each of ``sought``."""
    if isinstance(sought, str) and len(text) * len(sought) > MOST_LETTERS_IN_ALL:
        raise ValueError(f"it looks for {len(sought)} letters in {len(text)}, which takes too long")


def require_formatted(text: str, mark: str, values: Iterable[object]) -> None:
    """Raises ValueError where ``text``, whose fields begin with ``mark`` ("%" or "{"), may get too long by widths or
    ``values``."""
    if _WIDTH_OF_VALUE[mark].search(text.replace("{{", "")):
        raise ValueError("it formats by a width that is a value; expected a number in the format")
    fields = _FIELD[mark].findall(text)
    widest = max((int(number) for field in fields for number in _NUMBER.findall(field)), default=0)
    require_letters(len(text) + len(fields) * (widest + sum(map(letters_of, values))))


def require_dated(text: str) -> None:
    """Raises ValueError where a date in the format ``text`` may get too long by the widths of its fields."""
    require_letters(len(text) + sum(map(int, _DATE_WIDTH.findall(text))))


def require_operation(operator: str, left: Any, right: Any) -> None:
    """Raises ValueError where ``left operator right`` may get too large."""
    if operator == "%" and isinstance(left, str):
        require_formatted(left, "%", [right])
    elif operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int):
                require_letters(letters_of(one) * other)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _require_bits(left.bit_length() * right)


def _require_bits(count: int) -> None:
    if count > _MOST_BITS:
        raise ValueError(f"it makes a number of more than {_MOST_BITS} bits")


def _letters_of(value: object, known: dict[int, int]) -> int:
    """``known``: the sizes of lists and the like that were met, by identity."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        _require_bits(value.bit_length())
    if not isinstance(value, list | tuple | dict):
        return 1
    if id(value) not in known:
        parts: Iterable[object] = chain(value, value.values()) if isinstance(value, Mapping) else value
        known[id(value)] = sum(_LETTERS_OF_ELEMENT + _letters_of(part, known) for part in parts)
    return known[id(value)]
