"""What caches of keys and values have in common, wherever they lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

import numpy as np

from ..engines.runner import Runner
from ..inputs.arrays import Array
from .sliding_window import SlidingWindow
from .sources.any_source import AnySource, Tensor


class BoundCall(Protocol):
    """A run of an engine on a cache, as often as the call is made."""

    def __call__(self) -> None: ...

    def close(self) -> None:
        """Gives back what the call keeps; it cannot be made again."""
        ...


@dataclass(frozen=True)
class AnyCache(ABC, Generic[Tensor]):
    """``tensors`` are keys and values of each layer in turn, ``[rows, heads, places, size]`` float32 each: a place for
    each of the ``capacity`` tokens that a row has room for, or fewer, through which the ``window`` of a layer slides.
    Behind an encoder each row also has what that made of its prompt, in ``source``.

    Rows of it are caches too, on the same memory, and so are the first heads of one row.
    """

    tensors: tuple[Tensor, ...]
    capacity: int
    source: AnySource[Tensor] | None = None
    window: SlidingWindow | None = None

    @property
    def rows(self) -> int:
        return int(self.tensors[0].shape[0])

    @property
    def longest_run(self) -> int:
        """The most new tokens of a row that have room at once."""
        places = min(tensor.shape[2] for tensor in self.tensors)
        return self.capacity if self.window is None or places == self.capacity else places - self.window.seen

    @property
    def heads(self) -> tuple[int, ...]:
        """Of each layer, and of what each reads of a prompt."""
        read: tuple[int, ...] = () if self.source is None else self.source.heads
        return (*(tensor.shape[1] for tensor in self.tensors[::2]), *read)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of a head, as ``heads`` has them."""
        read: tuple[int, ...] = () if self.source is None else self.source.sizes
        return (*(tensor.shape[3] for tensor in self.tensors[::2]), *read)

    @property
    def bytes(self) -> int:
        """What it takes once every token is written."""
        kept = sum(int(np.prod(tensor.shape)) * 4 for tensor in self.tensors)
        return kept + (0 if self.source is None else self.source.bytes)

    def fits(self, heads: Sequence[int], sizes: Sequence[int], rows: int) -> bool:
        """Whether runs of ``rows`` rows may have such heads of it: of several rows just these, of one row as many as
        there are or fewer, of which they are the first."""
        fewer = rows == 1 and all(few <= kept for few, kept in zip(heads, self.heads, strict=True))
        return tuple(sizes) == self.sizes and (fewer or tuple(heads) == self.heads)

    def usable(self, row: int, tokens: int) -> int:
        """How many of the first ``tokens`` of a row may be continued: all, or none where a window no longer has what
        the next one sees."""
        return tokens if self.window is None or self.window.reaches(row, tokens) else 0

    def named(self, prefix: str) -> Mapping[str, Tensor]:
        """The tensors by the names that engines have for them: ``past_`` or ``present_``."""
        return dict(zip(self._names(prefix), self.tensors, strict=True))

    @abstractmethod
    def part(self, start: int, stop: int) -> AnyCache[Tensor]:
        """Rows ``start`` to ``stop``, which is left out."""

    @abstractmethod
    def laid_out(self, heads: Sequence[int], sizes: Sequence[int]) -> AnyCache[Tensor]:
        """The same memory for that many heads of each layer, and of what each reads of a prompt, at most what there
        are, and for such sizes of them. Of one row fewer heads of one size are its first; else what was written is
        lost."""

    @abstractmethod
    def make_room(self, row: int, position: int, tokens: int, drafted: int = 0) -> None:
        """Room for a run of ``tokens`` of ``row`` from ``position`` of the text on, which is within the capacity, in
        layers with a window; ``drafted`` tokens before them may be refused."""

    @abstractmethod
    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """Makes the first ``tokens`` of row ``target`` those of row ``source``."""

    @abstractmethod
    def swap_rows(self, one: int, other: int, tokens: int) -> None:
        """Exchanges the first ``tokens`` of two rows."""

    @abstractmethod
    def bind(self, runner: Runner, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> BoundCall:
        """A call that runs the open ``runner`` from ``feeds`` into ``outputs`` on this cache, which it updates in
        place. Raises InputError for what does not fit the engine."""

    @abstractmethod
    def read(self, number: int, row: int, start: int, stop: int) -> Array:
        """Places ``start`` to ``stop``, which is left out, of a row of tensor ``number``: ``[1, heads, places, size]``,
        a copy on the host."""

    def _names(self, prefix: str) -> Iterator[str]:
        for layer in range(len(self.tensors) // 2):
            yield from (f"{prefix}key_{layer}", f"{prefix}value_{layer}")
