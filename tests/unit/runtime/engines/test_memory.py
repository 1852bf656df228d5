"""What is open under a cap."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import SelectionError
from nestforge.ownership import Owner
from nestforge.runtime.engines.memory import MemoryCap, engine_needs


def test_engines_and_caches_count_together(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    first, second = bundle.manifest.engines[:2]
    needs = engine_needs(bundle, (first, second))
    sizes = [need.weight_bytes + need.own_bytes for need in needs]
    cap = MemoryCap(bundle, (sum(sizes) + 50) / 1e6)
    one, two, cache, last = Owner(), Owner(), Owner(), Owner()
    cap.open(one, first, "packed")
    assert cap.left_mb == pytest.approx((sizes[1] + 50) / 1e6)
    cap.take(cache, 50, "a cache", "ask for fewer rows")
    line = r"^memory_mb=\S+: a cache of 1\.0 MB, 0\.\d MB are left; ask for fewer rows, or raise the cap$"
    with pytest.raises(SelectionError, match=line):
        cap.take(last, 1_000_000, "a cache", "ask for fewer rows")
    cap.open(two, second, "packed")
    assert cap.left_mb == pytest.approx(0)
    assert cap.left_mb_without([(second, "packed")]) == pytest.approx(sizes[1] / 1e6)
    assert cap.left_mb == pytest.approx(0)
    two.is_over = True
    two = Owner()
    cap.take(last, 1, "a cache", "ask for fewer rows")
    with pytest.raises(SelectionError, match=rf"engine {second.id} as packed takes 0\.0 MB more than is left beside"):
        cap.open(two, second, "packed")
    assert (cap.taken_by(cache), cap.taken_by(last)) == (50, 1)
    del last
    cap.open(two, second, "packed")
    one.is_over = cache.is_over = True
    assert cap.left_mb == pytest.approx((sizes[0] + 50) / 1e6)
