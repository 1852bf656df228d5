"""What keys and values of a text take while a language model generates, behind its windows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...bundle.entries.generation_entry import CachedLayer, GenerationEntry, cache_bytes

# A capacity that many texts need.
_TOKENS = 2048


@dataclass(frozen=True)
class CacheSize:
    """``bytes`` of the keys and values of one row with room for ``tokens``."""

    tokens: int
    bytes: int


def cache_sizes(layers: Sequence[CachedLayer], positions: int, longest_run: int) -> tuple[CacheSize, ...]:
    """At a common capacity and at the largest."""
    capacities = sorted({min(_TOKENS, positions), positions})
    return tuple(CacheSize(tokens, cache_bytes(layers, 1, tokens, longest_run)) for tokens in capacities)


def sizes_at(layers: Sequence[CachedLayer], capacities: Iterable[int]) -> tuple[CacheSize, ...]:
    """At capacities that are static, where every layer has so many places."""
    return tuple(CacheSize(tokens, cache_bytes(layers, 1, tokens, tokens)) for tokens in sorted(set(capacities)))


def sizes_of(entry: GenerationEntry | None) -> tuple[CacheSize, ...]:
    """Of a bundle; none where it does not generate."""
    if entry is None:
        return ()
    if capacities := [engine.capacity for engine in entry.engines if engine.capacity is not None]:
        return sizes_at(entry.layers, capacities)
    return cache_sizes(entry.layers, entry.positions, entry.longest_run)


def cache_facts(sizes: Sequence[CacheSize]) -> list[tuple[str, str]]:
    """Name and value; nothing for no ``sizes``."""
    each = ", ".join(f"{size.bytes / 1e6:.1f} MB of {size.tokens} tokens" for size in sizes)
    return [("cache of a row", each)] if sizes else []
