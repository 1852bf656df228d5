"""Values from outside, made fit for a message and a terminal: names, values, and what libraries raise.

Files and libraries may say anything: line breaks that fake a second message, escape sequences that drive a terminal,
halves of surrogate pairs that no stream takes. ``NestforgeError`` and ``tools/console.py`` pass everything through
``printable``; what a library raises on a damaged file becomes an error of ours in ``library_errors``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Most letters of what a library says, and of a whole message; longer ones lose their middle.
_MOST_SAID = 300
_MOST = 800


def printable(text: str, most: int | None = None) -> str:
    """``text`` as one line: characters that cannot be printed as escapes (``\\n``, ``\\x1b``, ``\\ud800``), and of more
    than ``most`` characters the beginning and the end."""
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else _escape(letter) for letter in text)
    if most is None or len(text) <= most:
        return text
    kept = (most - 5) // 2
    return f"{text[: most - 5 - kept]} ... {text[-kept:]}"


def message(text: str) -> str:
    """``text`` as an error says it: printable, and of bounded length."""
    return printable(text, _MOST)


def said_by(failure: BaseException) -> str:
    """The first line of what a library's exception says, printable and short; its type where it says nothing."""
    # Raised in the place of the library's own where its message was not UTF-8.
    text = failure.object.decode(errors="replace") if isinstance(failure, UnicodeDecodeError) else str(failure)
    lines = text.strip().splitlines()
    return printable(lines[0], _MOST_SAID) if lines else type(failure).__name__


def is_of_library(failure: BaseException) -> bool:
    """Whether ``failure``, raised where nothing but a library ran, is about what the library was given.

    Panics of Rust code derive from BaseException and pybind11 loses types, so every type counts but the ones that end a
    program.
    """
    return not isinstance(failure, (KeyboardInterrupt, SystemExit, GeneratorExit))


@contextmanager
def library_errors(ours: Callable[[str], Exception]) -> Iterator[None]:
    """Raises ``ours(what the library said)`` for whatever is raised inside, where nothing but a library may run."""
    try:
        yield
    except BaseException as failure:
        if not is_of_library(failure):
            raise
        raise ours(said_by(failure)) from failure


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
