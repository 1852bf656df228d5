"""The bytes of a cache, as `plan` and `inspect` state them."""

from __future__ import annotations

from pathlib import Path

from nestforge.bundle.entries.generation_entry import CachedLayer
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.generation.cache import Cache
from nestforge.runtime.summary.cache_sizes import CacheSize, cache_facts, cache_sizes, sizes_of
from nestforge.runtime.summary.tables import bundle_facts

GOLDEN = Path(__file__).parents[3] / "golden"
LAYERS = (CachedLayer(4, 64, window=512), CachedLayer(4, 64))


def test_behind_a_window_the_capacity_takes_nothing() -> None:
    token = 4 * 2 * 4 * 64
    sizes = cache_sizes(LAYERS, 8192, longest_run=512)
    assert sizes == (CacheSize(2048, token * (1024 + 2048)), CacheSize(8192, token * (1024 + 8192)))
    assert cache_facts(sizes) == [("cache of a row", "6.3 MB of 2048 tokens, 18.9 MB of 8192 tokens")]
    assert sizes[0].bytes == Cache.empty(LAYERS, 1, 2048, longest_run=512).bytes


def test_a_bundle_states_what_its_caches_take() -> None:
    bundle = open_bundle(GOLDEN / "bundle-windows")
    assert sizes_of(bundle.manifest.generation) == (CacheSize(560, 4 * 2 * 2 * 8 * (560 + 520)),)
    assert dict(bundle_facts(bundle.manifest, bundle.build))["cache of a row"] == "0.1 MB of 560 tokens"
    silent = open_bundle(GOLDEN / "bundle-ranges")
    assert "cache of a row" not in dict(bundle_facts(silent.manifest, silent.build))


def test_caches_of_one_size_are_stated_by_it() -> None:
    token = 4 * 2 * 4 * 8
    generation = open_bundle(GOLDEN / "bundle-tensorrt").manifest.generation
    assert sizes_of(generation) == (CacheSize(24, 24 * token), CacheSize(48, 48 * token))
