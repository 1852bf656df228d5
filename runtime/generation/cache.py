"""The keys and values that a language model keeps of the tokens it has seen, in memory of the host's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...bundle.entries.generation_entry import PAST, PRESENT, CachedLayer, places_of, window_of
from ..engines.runner import Runner
from ..inputs.arrays import Array
from .any_cache import AnyCache
from .sliding_window import SlidingWindow
from .sources.source import Source, first_of


@dataclass(frozen=True)
class Cache(AnyCache[Array]):
    """See ``AnyCache``; a window slides through the tensors ``slides[n]``."""

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

    def part(self, start: int, stop: int) -> Cache:
        """See ``AnyCache.part``."""
        source = None if self.source is None else self.source.part(start, stop)
        window = None if self.window is None else self.window.part(start, stop)
        return replace(self, tensors=tuple(tensor[start:stop] for tensor in self.tensors), source=source, window=window)

    def laid_out(self, heads: Sequence[int], sizes: Sequence[int]) -> Cache:
        """See ``AnyCache.laid_out``."""
        layers = len(self.tensors) // 2
        own = [kept for kept in zip(heads[:layers], sizes[:layers], strict=True) for _ in ("key", "value")]
        tensors = [
            first_of(tensor, (len(tensor), kept, tensor.shape[2], size))
            for tensor, (kept, size) in zip(self.tensors, own, strict=True)
        ]
        source = None if self.source is None else self.source.laid_out(heads[layers:], sizes[layers:])
        return replace(self, tensors=tuple(tensors), source=source)

    def make_room(self, row: int, position: int, tokens: int, drafted: int = 0) -> None:
        """See ``AnyCache.make_room``."""
        if self.window is not None:
            self.window.make_room(self._sliding, row, position, tokens, drafted)

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """See ``AnyCache.copy_row``."""
        for tensor in self.tensors:
            tensor[target, :, :tokens] = tensor[source, :, :tokens]
        if self.window is not None:
            self.window.copy_row(source, target)

    def swap_rows(self, one: int, other: int, tokens: int) -> None:
        """See ``AnyCache.swap_rows``."""
        for tensor in self.tensors:
            moved = tensor[one, :, :tokens].copy()
            tensor[one, :, :tokens] = tensor[other, :, :tokens]
            tensor[other, :, :tokens] = moved
        if self.source is not None:
            self.source.swap_rows(one, other)
        if self.window is not None:
            self.window.swap_rows(one, other)

    def bind(self, runner: Runner, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> HostCall:
        """See ``AnyCache.bind``."""
        return HostCall(runner.bind({**feeds, **self.inputs}, {**outputs, **self.named(PRESENT)}))

    def read(self, number: int, row: int, start: int, stop: int) -> Array:
        """See ``AnyCache.read``."""
        found: Array = self.tensors[number][row : row + 1, :, start:stop].copy()
        return found

    @property
    def inputs(self) -> Mapping[str, Array]:
        """Everything that an engine reads of it, by name."""
        counts, read = ({}, {}) if self.source is None else (self.source.counts, self.source.named())
        return {**counts, **read, **self.named(PAST)}

    @cached_property
    def _sliding(self) -> tuple[Array, ...]:
        """Tensors through which a window slides."""
        return tuple(tensor for tensor, slides in zip(self.tensors, self.slides, strict=True) if slides)


@dataclass(frozen=True)
class HostCall:
    """A call that keeps arrays of the host alone, which nobody needs to close."""

    call: Callable[[], None]

    def __call__(self) -> None:
        self.call()

    def close(self) -> None:
        """See ``BoundCall.close``: the garbage collector does it."""
