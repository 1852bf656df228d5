"""Texts of the gate as an engine that keeps a cache runs them, wherever the cache lies, behind prompts that an encoder
read.

No torch here: a plan is held against its graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from ....bundle.entries.engine_entry import EngineEntry, RoutingEntry
from ....bundle.entries.generation_entry import GenerationEntry
from ....runtime.device.device import Device
from ....runtime.engines.runner import Runner
from ....runtime.generation.any_cache import AnyCache
from ....runtime.generation.cache import Cache
from ....runtime.generation.cached_engine import CachedEngine
from ....runtime.generation.device_cache import DeviceCache
from ....runtime.generation.sources.device_source import DeviceSource
from ....runtime.generation.sources.source import Source, read_source
from ....runtime.inputs.arrays import Array, Arrays
from .cached_cases import SPARE, Batch, prompts_of


class PromptRoutes(NamedTuple):
    """The ``routes`` that an encoder took on the prompt of every row: ``taken``, by name, one after the other."""

    routes: Sequence[RoutingEntry]
    taken: Sequence[Arrays]


def read_prompts(runner: Runner, entry: GenerationEntry, batches: Sequence[Batch]) -> dict[str, list[Array]]:
    """What the open ``runner`` of an encoder returns of the prompt of every row, by the name of its case."""
    return {case.name: read_source(runner, entry, case.feeds["input_ids"][0]) for case in prompts_of(batches)}


def prompt_routes(runner: Runner, engine: EngineEntry, batches: Sequence[Batch]) -> PromptRoutes | None:
    """What the open ``runner`` of an encoder's ``engine`` decides on the way; None where it decides nothing."""
    if not engine.routing:
        return None
    names = [entry.name for entry in engine.routing]
    returned = (runner.run(case.feeds, routing=True)[-len(names) :] for case in prompts_of(batches))
    return PromptRoutes(engine.routing, [dict(zip(names, arrays, strict=True)) for arrays in returned])


def run_batches(
    runner: Runner,
    engine: EngineEntry,
    entry: GenerationEntry,
    batches: Sequence[Batch],
    read: Mapping[str, Sequence[Array]] | None = None,
    device: Device | None = None,
) -> list[Arrays]:
    """Per row the logits ``[1, S, vocabulary]`` behind each of its tokens, and what the cache holds of each layer in
    the end, ``key_0`` and ``value_0`` ``[1, heads, S, size]`` and so on; of a layer with a window those of the last
    tokens that it sees. ``runner`` is the open one of ``engine``;
    ``read`` is what an encoder returned of each prompt, by the name of its case. Of a
    plan the cache lies on its ``device``."""
    found: list[Arrays] = []
    for batch in batches:
        source = None if read is None else _source(entry, batch, read)
        if device is None:
            found += _run(runner, engine, entry, batch, _host_cache(engine, entry, batch, source))
            continue
        with _device_cache(engine, entry, batch, source, device) as cache:
            found += _run(runner, engine, entry, batch, cache)
    return found


def _source(entry: GenerationEntry, batch: Batch, read: Mapping[str, Sequence[Array]]) -> Source:
    """What an encoder ``read`` for the rows of ``batch``."""
    assert entry.encoder is not None
    most = max(row.prompt.tokens for row in batch) + SPARE
    source = Source.empty(entry, len(batch), min(most, entry.encoder.positions))
    for number, row in enumerate(batch):
        source.write(number, read[row.case.name])
    return source


@contextmanager
def _device_cache(
    engine: EngineEntry, entry: GenerationEntry, batch: Batch, source: Source | None, device: Device
) -> Iterator[DeviceCache]:
    assert engine.capacity is not None, "a plan's cache has one size"
    with ExitStack() as opened:
        there = None
        if source is not None:
            there = DeviceSource.copied(source, device)
            opened.callback(there.close)
        cache = DeviceCache.empty(entry.layers, len(batch), engine.capacity, device, there)
        opened.callback(cache.close)
        yield cache


def _host_cache(engine: EngineEntry, entry: GenerationEntry, batch: Batch, source: Source | None) -> Cache:
    longest = max(len(row.ids) for row in batch)
    capacity, run = min(entry.positions, longest + SPARE), max(row.longest_run for row in batch)
    if engine.capacity is not None:  # of one size, in every layer
        capacity, run = engine.capacity, engine.capacity
    return Cache.empty(entry.layers, len(batch), capacity, source, run)


def _run(
    runner: Runner, engine: EngineEntry, entry: GenerationEntry, batch: Batch, cache: AnyCache[Any]
) -> list[Arrays]:
    cached = CachedEngine(runner, engine, entry, cache)
    try:
        logits = _logits(cached, batch)
        return [
            {"logits": np.concatenate(own)[None], **_kept(entry, cache, number, len(row.ids))}
            for number, (row, own) in enumerate(zip(batch, logits, strict=True))
        ]
    finally:
        cached.close()


def _logits(cached: CachedEngine, batch: Batch) -> list[list[np.ndarray]]:
    """Of each row those behind its pieces, ``[tokens, vocabulary]`` each."""
    for number, row in enumerate(batch):
        if row.again:
            cached.extend(number, row.ids[::-1].copy(), 0, [])
    written = [0] * len(batch)
    logits: list[list[np.ndarray]] = [[] for _ in batch]
    for pieces in zip_longest(*(row.pieces for row in batch)):
        if all(piece == 1 for piece in pieces):
            behind = cached.step([row.ids[at] for row, at in zip(batch, written, strict=True)], written)
            for found, own in zip(logits, behind, strict=True):
                found.append(own[None].copy())
        else:
            for number, (row, piece) in enumerate(zip(batch, pieces, strict=True)):
                tokens = row.ids[written[number] : written[number] + piece]
                logits[number].append(cached.extend(number, tokens, written[number], range(piece)))
        written = [at + piece for at, piece in zip(written, pieces, strict=True)]
    return logits


def _kept(entry: GenerationEntry, cache: AnyCache[Any], row: int, tokens: int) -> Arrays:
    """What ``cache`` has of a row of so many ``tokens``, as ``run_batches`` returns it."""
    found: dict[str, np.ndarray] = {}
    for number, layer in enumerate(entry.layers):
        for place, kind in enumerate(("key", "value")):
            start = 0 if layer.window is None or cache.window is None else int(cache.window.starts[row])
            first = 0 if layer.window is None else max(0, tokens - layer.window)
            found[f"{kind}_{number}"] = cache.read(2 * number + place, row, first - start, tokens - start)
    return found
