"""Engines that are open under a cap."""

from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import BuildRecord
from nestforge.bundle.entries.engine_entry import Segment
from nestforge.bundle.manifest import Manifest, SubmodelEntry
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.elastic import Axis
from nestforge.errors import SelectionError
from nestforge.ownership import Owner
from nestforge.runtime.engines.memory import MemoryCap, engine_needs, residencies_for
from support.exit_bundles import exits_manifest


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


MB = 10**6
PER_LAYER = {"to1": 10, "to2": 10, "to4": 20}  # MB


def bundle_of(manifest: Manifest) -> Bundle:
    return Bundle(Path("b"), manifest, BuildRecord(1, "", "", (), {}, {}, {}, ()))


@pytest.fixture
def bundle() -> Bundle:
    """One bucket; 10 MB a layer, 1 MB of its own for every engine."""
    manifest = exits_manifest([Bucket(1, 8)])
    engines = tuple(
        replace(engine, private_bytes=0, activation_bytes=MB, weight_bytes=MB * PER_LAYER.get(engine.segment or "", 0))
        for engine in manifest.engines
    )
    submodels = tuple(replace(entry, weight_bytes=MB * 10 * entry.values["depth"][0]) for entry in manifest.submodels)
    return bundle_of(replace(manifest, engines=engines, submodels=submodels, budgets=()))


def files(bundle: Bundle) -> set[str]:
    return {engine.file for engine in bundle.manifest.engines}


def test_the_layers_of_each_engine(bundle: Bundle) -> None:
    needs = {
        need.engine: (need.layers, need.weight_bytes // MB) for need in engine_needs(bundle, bundle.manifest.engines)
    }
    assert needs == {
        "depth2@b1-s8": ((0, 2), 20),
        "depth2.to1@b1-s8": ((0, 1), 10),
        "depth2.to2@b1-s8": ((1, 2), 10),
        "depth4@b1-s8": ((0, 4), 40),
        "depth4.to1@b1-s8": ((0, 1), 10),
        "depth4.to2@b1-s8": ((1, 2), 10),
        "depth4.to4@b1-s8": ((2, 4), 20),
    }


def test_shared_pages_count_once(bundle: Bundle) -> None:
    assert len(files(bundle)) == 5
    engines = bundle.manifest.engines
    shared = residencies_for(bundle, engines, 45, "shared")  # 40 MB of weights, 5 files with 1 MB each
    assert shared == dict.fromkeys((engine.id for engine in engines), "shared")
    with pytest.raises(SelectionError, match=r"memory_mb=44.9: 5 engines as shared take 45.0 MB"):
        residencies_for(bundle, engines, 44.9, "shared")
    segments = [engine for engine in engines if engine.segment]
    assert residencies_for(bundle, segments, 43, "shared")  # of different layers: their sum
    with pytest.raises(SelectionError, match=r"3 engines as shared take 43.0 MB"):
        residencies_for(bundle, segments, 42, "shared")
    with pytest.raises(SelectionError, match=r"5 engines as packed take 105.0 MB"):
        residencies_for(bundle, engines, 104, "packed")


def test_whole_engines_are_admitted_before_segments(bundle: Bundle) -> None:
    engines = bundle.manifest.engines
    assert residencies_for(bundle, engines, 41).keys() == {"depth4@b1-s8"}
    assert set(residencies_for(bundle, engines, 42)) == {"depth4@b1-s8", "depth2@b1-s8"}
    assert "depth4.to4@b1-s8" not in residencies_for(bundle, engines, 42)
    assert len(residencies_for(bundle, engines, 45)) == len(engines)


def test_without_a_cap_one_file_has_one_residency(bundle: Bundle) -> None:
    assert set(residencies_for(bundle, bundle.manifest.engines, None).values()) == {"packed"}


def test_layers_that_a_submodel_has_not_do_not_keep_it_from_nesting(bundle: Bundle) -> None:
    """Behind its depth a submodel's widths are stated as full; they are not read."""
    axes = (*(Axis(f"layers.{layer}.ffn", 8) for layer in range(4)), *bundle.manifest.axes)
    narrow = SubmodelEntry("narrow", (), {"ffn": (4, 4, 4, 4), "depth": (4,)}, 1, 20 * MB)
    shallow = SubmodelEntry("shallow", (), {"ffn": (4, 4, 8, 8), "depth": (2,)}, 1, 10 * MB)
    wide = SubmodelEntry("wide", (), {"ffn": (8, 8, 8, 8), "depth": (4,)}, 1, 40 * MB)
    base = next(engine for engine in bundle.manifest.engines if engine.segment is None)
    engines = [
        replace(base, id=name, file=name, submodel=name, activation_bytes=0) for name in ("narrow", "shallow", "wide")
    ]
    engines.append(
        replace(
            base,
            id="part",
            file="part",
            submodel="narrow",
            kind=Segment(part="to4"),
            weight_bytes=5 * MB,
            activation_bytes=0,
        )
    )
    changed = bundle_of(replace(bundle.manifest, axes=axes, submodels=(narrow, shallow, wide)))
    assert residencies_for(changed, engines[:2], 20, "shared")  # shallow lies within narrow
    assert residencies_for(changed, engines, 40, "shared")  # and all within wide
    assert residencies_for(changed, [engines[1], engines[3]], 15, "shared")  # of different layers
    with pytest.raises(SelectionError, match=r"2 engines as shared take 15.0 MB"):
        residencies_for(changed, [engines[1], engines[3]], 14, "shared")
    with pytest.raises(SelectionError, match=r"2 engines as shared take 20.0 MB"):
        residencies_for(changed, [engines[0], engines[3]], 19, "shared")


def test_segments_that_no_chain_can_use_take_no_memory(bundle: Bundle) -> None:
    """Whole engines of 41 and 21 MB; a segment alone would fit in 11 and could answer nothing."""
    engines = bundle.manifest.engines
    with pytest.raises(SelectionError, match=r"no engine fits; the smallest, depth2@b1-s8, takes 21.0 MB"):
        residencies_for(bundle, engines, 20)
    assert residencies_for(bundle, engines, 21).keys() == {"depth2@b1-s8"}
    shallow = {"depth2@b1-s8", "depth2.to1@b1-s8", "depth2.to2@b1-s8", "depth4.to1@b1-s8", "depth4.to2@b1-s8"}
    assert residencies_for(bundle, engines, 23).keys() == shallow, "files that the shallow chain shares"


def test_tables_are_the_engines_own_need(bundle: Bundle) -> None:
    """They are those of its bucket, which no larger submodel at another bucket reads."""
    engine = next(engine for engine in bundle.manifest.engines if engine.id == "depth2@b1-s8")
    (plain,) = engine_needs(bundle, [engine])
    (need,) = engine_needs(bundle, [replace(engine, weight_bytes=23 * MB)])
    assert (need.weight_bytes, need.own_bytes) == (plain.weight_bytes, plain.own_bytes + 3 * MB)


def test_engines_of_other_precisions_share_no_pages() -> None:
    manifest = exits_manifest([Bucket(1, 8)])
    axes = (Axis("layers.0.ffn", 8),)
    entries = tuple(
        SubmodelEntry(f"ffn{ffn}{end}", (), {"ffn": (ffn,)}, ffn, ffn * size * MB, precision=precision)
        for ffn in (4, 8)
        for precision, end, size in (("int8", ".int8", 1), ("fp32", "", 4))
    )
    whole = next(engine for engine in manifest.engines if engine.segment is None)
    engines = tuple(
        replace(
            whole,
            id=entry.id,
            submodel=entry.id,
            file=f"{entry.id}.onnx",
            weight_bytes=None,
            precision=entry.precision,
        )
        for entry in entries
    )
    several = bundle_of(replace(manifest, axes=axes, submodels=entries, engines=engines, budgets=(), exits=None))
    own = sum(engine.private_bytes + engine.activation_bytes for engine in engines) / MB
    shared = residencies_for(several, engines, 8 + 32 + own, "shared")
    assert set(shared.values()) == {"shared"}
    with pytest.raises(SelectionError, match="4 engines as shared take 40"):
        residencies_for(several, engines, 8 + 32 + own - 0.5, "shared")
