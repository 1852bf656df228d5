"""Manifests of submodels of 1, 2 and 4 ms, and a dispatcher over their engines."""

from dataclasses import replace

from nestforge.bucket import Bucket
from nestforge.bundle.build_record import Latency
from nestforge.bundle.manifest import BudgetEntry, Limits, Manifest, SubmodelEntry
from nestforge.runtime.dispatcher import Dispatcher
from nestforge.runtime.engines.residency import Residency
from nestforge.runtime.request import Request
from support.latencies import latency

MB = 10**6
SIZES = {"small": 1, "medium": 2, "large": 4}
FAST = Request(latency_ms=1)
BUCKETS = (Bucket(1, 32), Bucket(1, 128), Bucket(4, 32))


def make(manifest: Manifest, sizes: dict[str, int], buckets: tuple[Bucket, ...]) -> Manifest:
    """Submodels of 10 MB per step of size; every submodel at every bucket."""
    return replace(
        manifest,
        submodels=tuple(
            SubmodelEntry(name, (name[0].upper(),), {"ffn": (size,)}, size * 1000, size * 10 * MB)
            for name, size in sizes.items()
        ),
        engines=tuple(
            replace(
                manifest.engines[0],
                id=f"{name}@{bucket.label}",
                submodel=name,
                bucket=bucket,
                private_bytes=0,
                activation_bytes=MB,
            )
            for name in sizes
            for bucket in buckets
        ),
        budgets=(BudgetEntry("edge", Limits(latency_ms=3), "medium", "largest within 3 ms"),),
    )


def predicted(manifest: Manifest) -> list[Latency]:
    """1 ms per step of size and 32 tokens."""
    return [latency(e.id, SIZES[e.submodel] * e.bucket.tokens / 32) for e in manifest.engines]


def dispatcher(
    manifest: Manifest, latencies: list[Latency] | None = None, residency: Residency = "packed"
) -> Dispatcher:
    residencies = dict.fromkeys((engine.id for engine in manifest.engines), residency)
    return Dispatcher(manifest, residencies, predicted(manifest) if latencies is None else latencies)
