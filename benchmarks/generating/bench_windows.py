"""A step behind a long text, and the bytes of its cache, where windows slide through their buffers against buffers that
keep every token."""

from __future__ import annotations

from functools import partial

import numpy as np

from ... import load
from ...runtime.generation.cache import Cache
from ...runtime.generation.cached_engine import CachedEngine
from ..harness import Row, interleaved, ratio
from ..subjects import CORES
from .subject import mistral_bundle

_TOKENS = 8192
_ROUNDS, _STEPS = 7, 20
# Places behind the text, one for each step.
_CAPACITY = _TOKENS + 256


def run() -> list[Row]:
    with load(mistral_bundle(), threads=CORES) as model:
        entry = model.bundle.manifest.generation
        assert entry is not None
        ids = np.random.default_rng(0).integers(3, 32_000, _TOKENS)
        model.generate([5], max_tokens=2)  # opens the engine
        runner = model.generate._engines.get(entry.engines[-1])
        caches = {
            "every token": Cache.empty(entry.layers, 1, _CAPACITY),
            "sliding": Cache.empty(entry.layers, 1, _CAPACITY, longest_run=entry.longest_run),
        }
        engines = {name: CachedEngine(runner, entry.engines[-1], entry, cache) for name, cache in caches.items()}
        for engine in engines.values():
            engine.extend(0, ids, 0, [])
        times = interleaved(
            {name: partial(engine.step, [5], [_TOKENS]) for name, engine in engines.items()},
            _ROUNDS,
            _STEPS,
        )
    faster = ratio(times, "every token", "sliding")
    smaller = caches["every token"].bytes / caches["sliding"].bytes
    sizes = " against ".join(f"{cache.bytes / 1e6:.1f} MB" for cache in caches.values())
    how = f"4 layers with windows of 512, capacity {_CAPACITY}"
    return [
        Row(
            f"a step behind {_TOKENS} tokens, buffers of every token over sliding windows",
            f"{faster:.2f}x",
            ">= 1.00x",
            faster >= 1,
            f"{_ROUNDS} rounds in turn, medians of {_STEPS} steps, {CORES} threads, {how}",
        ),
        Row(
            "bytes of their caches",
            f"{smaller:.2f}x ({sizes})",
            ">= 4.00x",
            smaller >= 4,
            how,
        ),
    ]
