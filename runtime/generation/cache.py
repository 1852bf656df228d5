"""Keys and values that a decoder reads: of the tokens it has seen, in a KV cache; of prompts, from an encoder.

The common part of caches, wherever they lie, is ``AnyCache`` and ``AnySource``; those in memory of the host's follow,
``cache_memory.py`` has those of a device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ...bundle.entries.generation_entry import (
    PAST,
    POSITIONS,
    PRESENT,
    SOURCE_LENGTHS,
    CachedLayer,
    GenerationEntry,
    places_of,
    window_of,
)
from ..device.device import DeviceArray
from ..engines.runner import Runner
from ..inputs.arrays import Array
from .states import RowStates

Tensor = TypeVar("Tensor", Array, DeviceArray)
_SomeCache = TypeVar("_SomeCache", bound="AnyCache[Any]")
_SomeSource = TypeVar("_SomeSource", bound="AnySource[Any]")


class BoundCall(NamedTuple):
    """A run of an engine on a cache: ``call`` makes it, as often as it is called, until ``close`` gives back what it
    keeps."""

    call: Callable[[], None]
    close: Callable[[], None]


@dataclass(frozen=True)
class AnySource(ABC, Generic[Tensor]):
    """Keys and values that an encoder made of prompts, once: ``tensors`` are keys ``[rows, heads, size, tokens]``
    and values ``[rows, heads, tokens, size]`` float32 of each layer in turn; of a row the first ``lengths`` ``[rows]``
    int64 count, which lie on the host.

    Rows of it are sources too, on the same memory, and so are the first heads of one row.
    """

    tensors: tuple[Tensor, ...]
    lengths: Array

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(prod(tensor.shape) * 4 for tensor in self.tensors)

    @property
    def heads(self) -> tuple[int, ...]:
        """Number of heads of each layer."""
        return tuple(tensor.shape[1] for tensor in self.tensors[::2])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of a head of each layer."""
        return tuple(tensor.shape[2] for tensor in self.tensors[::2])

    @property
    def counts(self) -> Mapping[str, Array]:
        """Inputs beside keys and values, by name."""
        return {SOURCE_LENGTHS: self.lengths}

    def named(self) -> Mapping[str, Tensor]:
        """Keys and values by the names that engines have for them."""
        names = [f"source_{kind}_{layer}" for layer in range(len(self.tensors) // 2) for kind in ("key", "value")]
        return dict(zip(names, self.tensors, strict=True))

    def part(self: _SomeSource, start: int, stop: int) -> _SomeSource:
        """Rows ``start`` to ``stop``, which is left out."""
        tensors = tuple(_rows(tensor, start, stop) for tensor in self.tensors)
        return replace(self, tensors=tensors, lengths=self.lengths[start:stop])

    def laid_out(self: _SomeSource, heads: Sequence[int], sizes: Sequence[int]) -> _SomeSource:
        """As ``AnyCache.laid_out``."""
        found = []
        for place, (count, size) in enumerate(zip(heads, sizes, strict=True)):
            keys, values = self.tensors[2 * place : 2 * place + 2]
            found.append(_first_of(keys, (keys.shape[0], count, size, keys.shape[3])))
            found.append(_first_of(values, (values.shape[0], count, values.shape[2], size)))
        return replace(self, tensors=tuple(found))

    @abstractmethod
    def swap_rows(self, one: int, other: int) -> None:
        """Exchanges two rows."""

    @abstractmethod
    def read(self, row: int, runner: Runner, entry: GenerationEntry, prompt: Array) -> None:
        """Makes a row what the open ``runner`` of an encoder makes of a ``prompt``, tokens ``[N]`` int64 or one row of
        the array that it takes; ``entry`` has the heads of its submodel."""


@dataclass(frozen=True)
class SlidingWindow:
    """Buffers through which a window slides: of layers whose tokens see ``seen`` tokens at most, themselves included, a
    cache keeps no more than it must. ``starts`` ``[rows]`` int64 are the places in the text of the first token that the
    buffers of each row hold.

    Such a buffer has room for the tokens that a window holds and for those of a run. Where the next run would not fit,
    the tokens that its first one sees move to the front. They stay in their order, so that an engine reads a window as
    it reads a whole text, from another place on.
    """

    seen: int
    starts: Array

    @staticmethod
    def of(layers: Sequence[CachedLayer], rows: int) -> SlidingWindow | None:
        """The window of rows that hold nothing; None where no layer has one."""
        seen = window_of(layers)
        return None if seen is None else SlidingWindow(seen, np.zeros(rows, np.int64))

    def part(self, start: int, stop: int) -> SlidingWindow:
        """Rows ``start`` to ``stop``, which is left out, on the same memory."""
        return SlidingWindow(self.seen, self.starts[start:stop])

    def reaches(self, row: int, position: int) -> bool:
        """Whether a token at ``position`` of the text would see all that it must."""
        return bool(self.starts[row] <= self._first_seen(position))

    def make_room(self, tensors: Sequence[Array], row: int, position: int, tokens: int, drafted: int = 0) -> None:
        """Room in ``tensors`` ``[rows, heads, places, size]`` for ``tokens`` of ``row`` from ``position`` of the text
        on. ``drafted`` tokens before them may be refused, so that what the first of those sees stays too. A text begins
        anew at position 0. An interruption leaves a row of which nothing is reused."""
        if position == 0:
            self.starts[row] = 0
        places = tensors[0].shape[2]
        if position + tokens - self.starts[row] <= places:
            return
        first = self._first_seen(position - drafted)
        moved, at = position - first, first - int(self.starts[row])
        assert at >= 0, "what a token sees is gone"
        assert moved + tokens <= places, "a run of more tokens than the buffers have room for"
        self.starts[row] = _LOST
        for tensor in tensors:
            tensor[row, :, :moved] = tensor[row, :, at : at + moved]
        self.starts[row] = first

    def _first_seen(self, position: int) -> int:
        return max(0, position - self.seen + 1)


# Where the buffers of a row begin whose tokens are being moved: behind every text, so that nothing of it is reused.
_LOST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class AnyCache(ABC, Generic[Tensor]):
    """``tensors`` are keys and values of each layer in turn, ``[rows, heads, places, size]`` float32 each: a place for
    each of the ``capacity`` tokens that a row has room for, or fewer, through which the ``window`` of a layer slides.
    Behind an encoder each row also has what that made of its prompt, in ``source``; ``states`` are its recurrent ones.

    Rows of it are caches too, on the same memory, and so are the first heads of one row.
    """

    tensors: tuple[Tensor, ...]
    capacity: int
    source: AnySource[Tensor] | None = None
    window: SlidingWindow | None = None
    states: RowStates | None = None

    @property
    def rows(self) -> int:
        return int(self.tensors[0].shape[0]) if self.states is None else len(self.states.tokens)

    @property
    def longest_run(self) -> int:
        """The most new tokens of a row that have room at once."""
        places = min((tensor.shape[2] for tensor in self.tensors), default=self.capacity)
        return self.capacity if self.window is None or places == self.capacity else places - self.window.seen

    @property
    def heads(self) -> tuple[int, ...]:
        """Number of heads of each layer, and of what each reads of a prompt."""
        read: tuple[int, ...] = () if self.source is None else self.source.heads
        return (*(tensor.shape[1] for tensor in self.tensors[::2]), *read)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of a head, as ``heads`` has them."""
        read: tuple[int, ...] = () if self.source is None else self.source.sizes
        return (*(tensor.shape[3] for tensor in self.tensors[::2]), *read)

    @property
    def bytes(self) -> int:
        """Bytes that it takes once every token is computed."""
        own = sum(prod(tensor.shape) * 4 for tensor in self.tensors)
        return own + sum(each.bytes for each in (self.source, self.states) if each is not None)

    def fits(self, heads: Sequence[int], sizes: Sequence[int], rows: int) -> bool:
        """Whether runs of ``rows`` rows may have such heads of it: of several rows just these, of one row as many as
        there are or fewer, of which they are the first."""
        fewer = rows == 1 and all(few <= own for few, own in zip(heads, self.heads, strict=True))
        return tuple(sizes) == self.sizes and (fewer or tuple(heads) == self.heads)

    def usable(self, row: int, tokens: int) -> int:
        """How many of the first ``tokens`` of a row may be continued: all, or none where a window no longer has what
        the next one sees, or states have read others."""
        if self.states is not None and self.states.tokens[row] != tokens:
            return 0
        return tokens if self.window is None or self.window.reaches(row, tokens) else 0

    def named(self, prefix: str) -> Mapping[str, Tensor]:
        """The tensors by the names that engines have for them, ``past_`` or ``present_``, of layers with heads."""
        names = [f"{prefix}{kind}_{layer}" for layer in range(len(self.tensors) // 2) for kind in ("key", "value")]
        return {name: tensor for name, tensor in zip(names, self.tensors, strict=True) if tensor.shape[1]}

    def part(self: _SomeCache, start: int, stop: int) -> _SomeCache:
        """Rows ``start`` to ``stop``, which is left out."""
        source = None if self.source is None else self.source.part(start, stop)
        window = None if self.window is None else self.window.part(start, stop)
        states = None if self.states is None else self.states.part(start, stop)
        tensors = tuple(_rows(tensor, start, stop) for tensor in self.tensors)
        return replace(self, tensors=tensors, source=source, window=window, states=states)

    def laid_out(self: _SomeCache, heads: Sequence[int], sizes: Sequence[int]) -> _SomeCache:
        """The same memory for that many heads of each layer, and of what each reads of a prompt, at most what there
        are, and for such sizes of them. In one row fewer heads of one size are its first; else what was there is
        lost."""
        layers = len(self.tensors) // 2
        own = [each for each in zip(heads[:layers], sizes[:layers], strict=True) for _ in ("key", "value")]
        tensors = tuple(
            _first_of(tensor, (tensor.shape[0], count, tensor.shape[2], size))
            for tensor, (count, size) in zip(self.tensors, own, strict=True)
        )
        source = None if self.source is None else self.source.laid_out(heads[layers:], sizes[layers:])
        return replace(self, tensors=tensors, source=source)

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


@dataclass(frozen=True)
class Source(AnySource[Array]):
    """A source in memory of the host's."""

    @staticmethod
    def empty(entry: GenerationEntry, rows: int, tokens: int) -> Source:
        """For prompts of up to so many ``tokens``."""
        shapes = source_shapes(entry, rows, tokens)
        return Source(tuple(np.zeros(shape, np.float32) for shape in shapes), np.ones(rows, np.int64))

    def swap_rows(self, one: int, other: int) -> None:
        for tensor in (*self.tensors, self.lengths):
            tensor[[one, other]] = tensor[[other, one]]

    def read(self, row: int, runner: Runner, entry: GenerationEntry, prompt: Array) -> None:
        self.put(row, read_source(runner, entry, prompt))

    def put(self, row: int, found: Sequence[Array]) -> None:
        """Makes a row what ``read_source`` ``found`` of its prompt."""
        length = found[0].shape[3]
        for place, tensor in enumerate(self.tensors):
            (tensor[row, :, :, :length] if place % 2 == 0 else tensor[row, :, :length])[...] = found[place][0]
        self.lengths[row] = length


def read_source(runner: Runner, entry: GenerationEntry, prompt: Array) -> list[Array]:
    """An encoder's output, by its open ``runner``, for a ``prompt`` as of ``AnySource.read``: per layer keys
    ``[1, heads, size, N]`` and values ``[1, heads, N, size]`` in turn."""
    (given,), specs = entry.encoder_interface
    assert entry.encoder is not None
    found = [np.empty(shape, np.float32) for shape in source_shapes(entry, 1, entry.encoder.tokens_of(prompt))]
    names = [spec.name for spec in specs]
    runner.bind({given.name: np.ascontiguousarray(prompt[None])}, dict(zip(names, found, strict=True)))()
    return found


def source_shapes(entry: GenerationEntry, rows: int, tokens: int) -> Iterator[tuple[int, ...]]:
    """Shapes of keys and values of each layer in turn, for prompts of so many ``tokens``."""
    for layer in entry.source_layers:
        yield rows, layer.heads, layer.size, tokens
        yield rows, layer.heads, tokens, layer.size


@dataclass(frozen=True)
class Cache(AnyCache[Array]):
    """A cache in memory of the host's; a window slides through the tensors ``slides[n]``."""

    slides: tuple[bool, ...] = ()

    @staticmethod
    def empty(
        layers: Sequence[CachedLayer],
        rows: int,
        capacity: int,
        source: Source | None = None,
        longest_run: int | None = None,
        states: Sequence[Sequence[int]] = (),
    ) -> Cache:
        """Room for ``capacity`` tokens in each of ``rows`` rows; the system gives its pages as they are written. Where
        no run has more than ``longest_run`` new tokens of a row, layers with a window keep no more than they must.
        ``states`` are their shapes."""
        tensors, slides = [], []
        for layer, places in zip(layers, places_of(layers, capacity, longest_run), strict=True):
            for _ in ("key", "value"):
                tensors.append(np.zeros((rows, layer.heads, places, layer.size), np.float32))
                slides.append(layer.window is not None)
        window, own = SlidingWindow.of(layers, rows), RowStates.of(states, rows)
        return Cache(tuple(tensors), capacity, source, window, own, tuple(slides))

    def make_room(self, row: int, position: int, tokens: int, drafted: int = 0) -> None:
        if self.window is not None:
            self.window.make_room(self._sliding, row, position, tokens, drafted)

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        for tensor in self.tensors:
            tensor[target, :, :tokens] = tensor[source, :, :tokens]
        if self.window is not None:
            self.window.starts[target] = self.window.starts[source]
        if self.states is not None:
            self.states.copy_row(source, target)

    def swap_rows(self, one: int, other: int, tokens: int) -> None:
        for tensor in self.tensors:
            moved = tensor[one, :, :tokens].copy()
            tensor[one, :, :tokens] = tensor[other, :, :tokens]
            tensor[other, :, :tokens] = moved
        if self.source is not None:
            self.source.swap_rows(one, other)
        if self.window is not None:
            self.window.starts[[one, other]] = self.window.starts[[other, one]]
        if self.states is not None:
            self.states.swap_rows(one, other)

    def bind(self, runner: Runner, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> BoundCall:
        states = self.states
        written = {} if states is None else states.written
        call = runner.bind({**feeds, **self.inputs}, {**outputs, **self.named(PRESENT), **written})
        if states is not None:
            call = states.stepping(call, feeds[POSITIONS])
        return BoundCall(call, lambda: None)  # arrays of the host alone, which the garbage collector gives back

    def read(self, number: int, row: int, start: int, stop: int) -> Array:
        return self.tensors[number][row : row + 1, :, start:stop].copy()

    @property
    def inputs(self) -> Mapping[str, Array]:
        """Everything that an engine reads of it, by name."""
        counts, read = ({}, {}) if self.source is None else (self.source.counts, self.source.named())
        states = {} if self.states is None else self.states.read
        return {**counts, **read, **self.named(PAST), **states}

    @cached_property
    def _sliding(self) -> tuple[Array, ...]:
        """Tensors through which a window slides."""
        return tuple(tensor for tensor, slides in zip(self.tensors, self.slides, strict=True) if slides)


def _rows(tensor: Any, start: int, stop: int) -> Any:
    return tensor[start:stop] if isinstance(tensor, np.ndarray) else tensor.rows(start, stop)


def _first_of(tensor: Any, shape: tuple[int, ...]) -> Any:
    """The first numbers of ``tensor``, on its memory, as an array of ``shape``."""
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1)[: prod(shape)].reshape(shape)
    return replace(tensor, shape=shape)
