"""How a long job tells what it has done."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

# (stage, done, total): a stage counts its parts, and ends with done == total, where total may be 1 for the whole. A
# part that takes long is done by and by, in fractions. One that counts bytes has ``Bytes`` of both.
Progress = Callable[[str, float, int], None]


class Bytes(int):
    """A number of bytes."""


def silent(_stage: str, _done: float, _total: int) -> None:
    """Reports nothing."""


def counted(progress: Progress, stage: str, parts: Collection[T]) -> Iterator[T]:
    """``parts`` one after the other, each told as a part of the ``stage``."""
    for done, part in enumerate(parts):
        progress(stage, done, len(parts))
        yield part
    progress(stage, len(parts), len(parts))


_listener = ContextVar[Callable[[int, int], None]]("listener", default=lambda _done, _total: None)


@contextmanager
def heard_by(listener: Callable[[int, int], None]) -> Iterator[None]:
    """Within it ``listener`` hears what ``tell`` says."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def part_of(total: int, before: int) -> Iterator[None]:
    """Within it what is told of bytes is of a part of ``total``, behind the ``before`` first."""
    listener = _listener.get()
    with heard_by(lambda done, _: listener(Bytes(before + done), Bytes(total))):
        yield


def tell(done: int, total: int) -> None:
    """Says how far one long piece of work is, such as a file that is written, to the job that it is a part of, if there
    is one: files and passes lie too deep for a callback of every function above them."""
    _listener.get()(done, total)
