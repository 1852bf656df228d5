"""Who has what, so that an interrupt (Ctrl-C) leaves nothing taken for ever.

An interrupt may come between any two steps of a call: after something was taken and before it is noted, or before what
gives it back has begun. So nothing here is counted up and down. An owner is made before anything is taken; what a book
lists beside it counts while that owner is neither over nor collected; and one assignment ends all that it has:

    owner = Owner()
    try:
        book.add(owner, ...)
        ...
    finally:
        owner.is_over = True

The interpreter looks for interrupts when it has called a function, and when a loop turns, so that none comes before
that assignment; in a method that did the same it could. Where something else raises there, such as a debugger, the
owner is collected with its frame.
"""

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class Owner:
    """The owner of what books list beside it, until it ``is_over`` or collected."""

    __slots__ = ("__weakref__", "is_over")

    def __init__(self) -> None:
        self.is_over = False


class Owned(Generic[T]):
    """A book: what owners have of one thing. Its user has a lock for several threads."""

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[Owner], T]] = []

    def add(self, owner: Owner, what: T) -> None:
        """Lists ``what`` as the owner's; one owner may have several."""
        self.present()
        self._entries.append((weakref.ref(owner), what))

    def present(self) -> list[T]:
        """All that is owned now, in the order in which it was taken."""
        self._entries = [entry for entry in self._entries if (owner := entry[0]()) is not None and not owner.is_over]
        return [what for _, what in self._entries]

    def of(self, owner: Owner) -> list[T]:
        """The entries of ``owner`` alone."""
        return [what for ref, what in self._entries if ref() is owner and not owner.is_over]

    def remove(self, owner: Owner) -> None:
        """Removes every entry of ``owner``."""
        self._entries = [entry for entry in self._entries if entry[0]() is not owner]
