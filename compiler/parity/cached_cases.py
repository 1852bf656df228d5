"""Texts for the gate of KV-cache engines, the pieces in which they are given to them, and how an engine runs
them, wherever the cache lies, behind prompts that an encoder read.

No torch here: a plan is held against its graph.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, zip_longest
from typing import Any, NamedTuple

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry, RoutingEntry
from ...bundle.entries.generation_entry import WINDOW, GenerationEntry, present, window_of
from ...bundle.entries.tensor_spec import TensorSpec
from ...exporters.parts import MOST_NEW_TOKENS
from ...runtime.device.device import Device
from ...runtime.engines.runner import Runner
from ...runtime.generation.cache import AnyCache, Cache, Source, read_source
from ...runtime.generation.cache_memory import DeviceCache, DeviceSource
from ...runtime.generation.cached_engine import CachedEngine
from ...runtime.inputs.arrays import Array, Arrays
from .cases import Case, judged_places

# Tokens of a text; the longest has a piece that takes an engine two runs.
_TOKENS = 48
_LONGEST = MOST_NEW_TOKENS + 9
_MOST_DRAFTED = 8
# A text that is longer than the model's window by so much, where that has at most so many tokens and logits.
_BEYOND, _MOST_WINDOW, _MOST_LOGITS = 3 * _MOST_DRAFTED, 2048, 300_000_000
# Room behind the longest text: an engine must not depend on how much there is.
SPARE = 5
# Tokens that an encoder reads, of one text after the other; those of the longest text are the longest.
_SOURCE_TOKENS = (_TOKENS, 1, 7, 33, 5, 18)


@dataclass(frozen=True)
class Row:
    """A text whose tokens are given in ``pieces`` of so many, with room behind a window for runs of ``longest_run``:
    of few new tokens, so that short texts slide through it. ``again``: after another text of as many, as where somebody
    edits its beginning. ``source`` is the case of the encoder that reads its prompt."""

    case: Case
    pieces: tuple[int, ...]
    longest_run: int = _MOST_DRAFTED
    again: bool = False
    source: Case | None = None

    @property
    def ids(self) -> np.ndarray:
        """Its tokens ``[S]`` int64."""
        return self.case.feeds["input_ids"][0]


def behind(entry: GenerationEntry, row: Row, source: Array) -> Row:
    """``row`` behind a prompt ``source`` ``[1, ...]`` that the encoder of ``entry`` reads."""
    (spec,), _ = entry.encoder_interface
    case = replace(row.case, feeds={**row.case.feeds, "source": source})
    return replace(row, case=case, source=Case(row.case.name, {spec.name: source}))


def random_prompt(entry: GenerationEntry, rng: np.random.Generator, tokens: int) -> Array:
    """A prompt ``[1, ...]`` for the encoder of ``entry``: an array, or so many ``tokens``, or as many as it takes."""
    assert entry.encoder is not None
    if (spec := entry.encoder.input) is not None:
        return rng.standard_normal(spec.shape(Bucket(1, 1)), np.float32)
    return rng.integers(0, entry.vocabulary, (1, min(tokens, entry.encoder.positions)))


# Rows that are in one cache; pieces of one token that several have at once are given together.
Batch = tuple[Row, ...]


def judged_specs(entry: GenerationEntry) -> tuple[TensorSpec, ...]:
    """Reference of a text of ``S`` tokens: logits, keys and values of each layer, behind a window of the last tokens
    alone, and the states behind the last."""
    caches = [
        TensorSpec(
            f"{kind}_{number}",
            "float32",
            ("batch", layer.heads, "sequence" if layer.window is None else WINDOW, layer.size),
        )
        for number, layer in present(entry.layers)
        for kind in ("key", "value")
    ]
    states = [TensorSpec(f"state_{n}", "float32", ("batch", *shape)) for n, shape in enumerate(entry.states)]
    return (TensorSpec("logits", "float32", ("batch", "sequence", entry.vocabulary)), *caches, *states)


def cached_batches(entry: GenerationEntry, long: bool, tokens: int = _TOKENS) -> list[Batch]:
    """Texts at random, always the same: of so many ``tokens`` whole, in pieces as drafts are verified, token by token,
    and rows of different length; if ``long``, also one of more tokens than a run takes, where the model has so many
    positions, and one of more than its window has, where that is affordable, which slides within a piece and before a
    step. Behind an encoder each has a prompt of its own length, or an array of its own.
    """
    rng, source_rng = np.random.default_rng(entry.vocabulary), np.random.default_rng(entry.vocabulary + 1)
    lengths = cycle(_SOURCE_TOKENS)
    most = min(tokens, entry.positions - SPARE) if entry.positions > SPARE + 1 else entry.positions

    def row(name: str, pieces: Sequence[int], longest_run: int = _MOST_DRAFTED, again: bool = False) -> Row:
        ids = rng.integers(0, entry.vocabulary, (1, sum(pieces)))
        found = Row(Case(name, {"input_ids": ids}, picks=True), tuple(pieces), longest_run, again)
        if entry.encoder is None:
            return found
        read = _LONGEST if sum(pieces) == _LONGEST else next(lengths)
        return behind(entry, found, random_prompt(entry, source_rng, read))

    def single(prompt: int) -> list[int]:
        return [prompt, *[1] * (most - prompt)]

    drafted: list[int] = []
    while sum(drafted) < most:
        drafted.append(min(int(rng.integers(1, _MOST_DRAFTED + 1)), most - sum(drafted)))
    steps = max(1, most // 4)
    prompts = [max(1, most - steps), max(1, most // 5), 1]
    batches = [
        (row("whole", [most], MOST_NEW_TOKENS),),
        (row("in pieces", drafted, again=True),),
        (row("token by token", single(max(1, most // 3))),),
        tuple(row(f"row {number} of {len(prompts)}", [p, *[1] * steps]) for number, p in enumerate(prompts)),
    ]
    if long and most < _LONGEST <= entry.positions - SPARE:
        batches.append((row("longer than a run", [_LONGEST - 2, 1, 1], MOST_NEW_TOKENS),))
    if long and (longest := _beyond_window(entry)) > most:
        batches.append((row("longer than the window", [longest - _MOST_DRAFTED, *[1] * _MOST_DRAFTED]),))
    return batches


def _beyond_window(entry: GenerationEntry) -> int:
    """Tokens of a text that is longer than the model's window; 0 where it has none or a proof would take too long."""
    window = window_of(entry.layers)
    if window is None or window > _MOST_WINDOW:
        return 0
    tokens = min(window + _BEYOND, entry.positions - SPARE)
    return tokens if tokens > window and tokens * entry.vocabulary <= _MOST_LOGITS else 0


def unproven_window(entry: GenerationEntry, batches: Sequence[Batch]) -> str | None:
    """Receipt's note on a model whose window is longer than every text of ``batches``; else None."""
    longest = max(len(row.ids) for batch in batches for row in batch)
    window = window_of(entry.layers)
    if window is None or not longest <= window < entry.positions:
        return None
    return f"no text was longer than its window of {window} tokens"


def cases_of(batches: Sequence[Batch]) -> list[Case]:
    """The text of every row."""
    return [row.case for batch in batches for row in batch]


def prompts_of(batches: Sequence[Batch]) -> list[Case]:
    """An encoder's prompt before every row."""
    return [row.source for batch in batches for row in batch if row.source is not None]


class PromptRoutes(NamedTuple):
    """The ``routes`` that an encoder took on the prompt of every row: ``taken``, by name, one after the other."""

    routes: Sequence[RoutingEntry]
    taken: Sequence[Arrays]


def read_prompts(runner: Runner, entry: GenerationEntry, batches: Sequence[Batch]) -> dict[str, list[Array]]:
    """Outputs of an encoder's open ``runner`` for the prompt of every row, by the name of its case."""
    return {case.name: read_source(runner, entry, prompt_in(case)) for case in prompts_of(batches)}


def prompt_in(case: Case) -> Array:
    """The prompt of an encoder's ``case``, without its row."""
    (prompt,) = case.feeds.values()
    return prompt[0]


def prompt_routes(runner: Runner, engine: EngineEntry, batches: Sequence[Batch]) -> PromptRoutes | None:
    """Decisions of the open ``runner`` of an encoder's ``engine`` on the way; None where it decides nothing."""
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
    """Per row the logits ``[1, S, vocabulary]`` behind its ``judged_places``, and what the cache holds of each layer in
    the end, ``key_0`` and ``value_0`` ``[1, heads, S, size]`` and so on; of a layer with a window those of the last
    tokens that it sees. ``runner`` is the open one of ``engine``;
    ``read`` is what an encoder returned of each prompt, by the name of its case. A plan's cache lies on its
    ``device``."""
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
    """An encoder's output in ``read`` for the rows of ``batch``."""
    assert entry.encoder is not None
    most = max(entry.encoder.tokens_of(prompt_in(case)) for case in prompts_of([batch])) + SPARE
    source = Source.empty(entry, len(batch), min(most, entry.encoder.positions))
    for number, row in enumerate(batch):
        source.put(number, read[row.case.name])
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
    return Cache.empty(entry.layers, len(batch), capacity, source, run, entry.states)


def _run(
    runner: Runner, engine: EngineEntry, entry: GenerationEntry, batch: Batch, cache: AnyCache[Any]
) -> list[Arrays]:
    cached = CachedEngine(runner, engine, entry, cache)
    try:
        logits = _logits(cached, batch, entry.vocabulary)
        return [
            {"logits": np.concatenate(own)[None], **_cached_values(entry, cache, number, len(row.ids))}
            for number, (row, own) in enumerate(zip(batch, logits, strict=True))
        ]
    finally:
        cached.close()


def _logits(cached: CachedEngine, batch: Batch, vocabulary: int) -> list[list[np.ndarray]]:
    """Logits of each row behind its pieces, ``[tokens that are judged, vocabulary]`` each."""
    judged = [set(judged_places(len(row.ids), vocabulary)) for row in batch]
    for number, row in enumerate(batch):
        if row.again:
            cached.extend(number, row.ids[::-1].copy(), 0, [])
    written = [0] * len(batch)
    logits: list[list[np.ndarray]] = [[] for _ in batch]
    for pieces in zip_longest(*(row.pieces for row in batch)):
        if all(piece == 1 for piece in pieces):
            behind = cached.step([row.ids[at] for row, at in zip(batch, written, strict=True)], written)
            for found, own, at, places in zip(logits, behind, written, judged, strict=True):
                if at in places:
                    found.append(own[None].copy())
        else:
            for number, (row, piece) in enumerate(zip(batch, pieces, strict=True)):
                at = written[number]
                wanted = [place for place in range(piece) if at + place in judged[number]]
                logits[number].append(cached.extend(number, row.ids[at : at + piece], at, wanted))
        written = [at + piece for at, piece in zip(written, pieces, strict=True)]
    return logits


def _cached_values(entry: GenerationEntry, cache: AnyCache[Any], row: int, tokens: int) -> Arrays:
    """Part of ``cache`` of a row of so many ``tokens``, as ``run_batches`` returns it."""
    found: dict[str, np.ndarray] = {}
    for number, layer in present(entry.layers):
        for place, kind in enumerate(("key", "value")):
            start = 0 if layer.window is None or cache.window is None else int(cache.window.starts[row])
            first = 0 if layer.window is None else max(0, tokens - layer.window)
            found[f"{kind}_{number}"] = cache.read(2 * number + place, row, first - start, tokens - start)
    if cache.states is not None:
        found |= {f"state_{n}": tensor[row : row + 1].copy() for n, tensor in enumerate(cache.states.tensors)}
    return found
