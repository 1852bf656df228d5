"""The keys and values that a language model keeps of the tokens it has seen, in memory of the caller's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..bundle.entries.generation_entry import CachedLayer, places_of, window_of
from ..inputs.arrays import Array
from .sliding_window import SlidingWindow
from .source import Source


@dataclass(frozen=True)
class Cache:
    """``tensors`` are keys and values of each layer in turn, ``[rows, heads, places, size]`` float32 each: a place for
    each of the ``capacity`` tokens that a row has room for, or fewer, ``slides[n]``, through which the ``window`` of a
    layer slides. Behind an encoder each row also has what that made of its prompt, in ``source``.

    Rows of it are caches too, on the same memory, and so are the first heads of one row.
    """

    tensors: tuple[Array, ...]
    capacity: int
    source: Source | None = None
    window: SlidingWindow | None = None
    slides: tuple[bool, ...] = ()

    @staticmethod
    def empty(
        layers: Sequence[CachedLayer],
        rows: int,
        capacity: int,
        source: Source | None = None,
        longest_run: int | None = None,
    ) -> Cache:
        """Room for ``capacity`` tokens in each of ``rows`` rows; the system gives its pages as they are written. Where
        no run has more than ``longest_run`` new tokens of a row, layers with a window keep no more than they must."""
        places = places_of(layers, capacity, longest_run)
        shapes = [
            (rows, layer.heads, own, layer.size)
            for layer, own in zip(layers, places, strict=True)
            for _ in ("key", "value")
        ]
        seen = window_of(layers)
        window = None if seen is None else SlidingWindow.empty(seen, rows)
        slides = tuple(layer.window is not None for layer in layers for _ in ("key", "value"))
        return Cache(tuple(np.zeros(shape, np.float32) for shape in shapes), capacity, source, window, slides)

    @property
    def rows(self) -> int:
        return len(self.tensors[0])

    @property
    def longest_run(self) -> int:
        """The most new tokens of a row that have room at once."""
        places = min(tensor.shape[2] for tensor in self.tensors)
        return self.capacity if self.window is None or places == self.capacity else places - self.window.seen

    @property
    def heads(self) -> tuple[int, ...]:
        """Of each layer."""
        return tuple(tensor.shape[1] for tensor in self.tensors[::2])

    @property
    def bytes(self) -> int:
        """What it takes once every token is written."""
        return sum(tensor.nbytes for tensor in self.tensors) + (0 if self.source is None else self.source.bytes)

    def part(self, start: int, stop: int) -> Cache:
        """Rows ``start`` to ``stop``, which is left out."""
        source = None if self.source is None else self.source.part(start, stop)
        window = None if self.window is None else self.window.part(start, stop)
        return replace(self, tensors=tuple(tensor[start:stop] for tensor in self.tensors), source=source, window=window)

    def with_heads(self, heads: Sequence[int]) -> Cache:
        """The same memory for that many heads of each layer, at most what there are. Of one row they are its first;
        of several what was written is lost."""
        tensors = [
            tensor.reshape(-1)[: len(tensor) * kept * tensor[0, 0].size].reshape(len(tensor), kept, *tensor.shape[2:])
            for tensor, kept in zip(self.tensors, (kept for kept in heads for _ in ("key", "value")), strict=True)
        ]
        return replace(self, tensors=tuple(tensors))

    def usable(self, row: int, tokens: int) -> int:
        """How many of the first ``tokens`` of a row may be continued: all, or none where a window no longer has what
        the next one sees."""
        return tokens if self.window is None or self.window.reaches(row, tokens) else 0

    def make_room(self, row: int, position: int, tokens: int, drafted: int = 0) -> None:
        """Room for a run of ``tokens`` of ``row`` from ``position`` of the text on, which is within the capacity, in
        layers with a window; ``drafted`` tokens before them may be refused."""
        if self.window is not None:
            self.window.make_room(self._sliding, row, position, tokens, drafted)

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """Makes the first ``tokens`` of row ``target`` those of row ``source``."""
        for tensor in self.tensors:
            tensor[target, :, :tokens] = tensor[source, :, :tokens]
        if self.window is not None:
            self.window.copy_row(source, target)

    def swap_rows(self, one: int, other: int, tokens: int) -> None:
        """Exchanges the first ``tokens`` of two rows."""
        for tensor in self.tensors:
            moved = tensor[one, :, :tokens].copy()
            tensor[one, :, :tokens] = tensor[other, :, :tokens]
            tensor[other, :, :tokens] = moved
        if self.source is not None:
            self.source.swap_rows(one, other)
        if self.window is not None:
            self.window.swap_rows(one, other)

    @property
    def inputs(self) -> Mapping[str, Array]:
        """Everything that an engine reads of it, by name."""
        return {**({} if self.source is None else self.source.named()), **self.named("past")}

    def named(self, prefix: str) -> Mapping[str, Array]:
        """The tensors by the names that engines have for them: ``past`` or ``present``."""
        return dict(zip(self._names(prefix), self.tensors, strict=True))

    @cached_property
    def _sliding(self) -> tuple[Array, ...]:
        """Tensors through which a window slides."""
        return tuple(tensor for tensor, slides in zip(self.tensors, self.slides, strict=True) if slides)

    def _names(self, prefix: str) -> Iterator[str]:
        for layer in range(len(self.tensors) // 2):
            yield from (f"{prefix}_key_{layer}", f"{prefix}_value_{layer}")
