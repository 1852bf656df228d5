"""A bundle whose latencies are wrong by a factor of five: how many requests until the right submodel answers."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory

from .... import ElasticModel, SelectionError, load
from ....compiler.work.clock import silent
from ....runtime.bundle.measurements import HostMeasurement, keep_measurement
from ....runtime.bundle.open_bundle import Bundle, open_bundle
from ....runtime.engines.measure_bundle import measure_bundle
from ....runtime.inputs.feeds import random_feeds
from ..harness import Row
from ..subjects import CORES, minilm_levels_bundle

_FACTORS = (5.0, 1 / 5)
_MOST_REQUESTS = 100
_BAR = 50


def run() -> list[Row]:
    """Limits lie between the times of each two neighbouring levels, and above the largest."""
    with TemporaryDirectory() as folder:
        path = Path(shutil.copytree(minilm_levels_bundle(), Path(folder) / "wrong.bundle"))
        bundle = open_bundle(path)
        right = measure_bundle(bundle, silent, threads=CORES, force=True).measurement
        times = sorted(engine.points[0].p50_ms for engine in right.engines)
        limits = [sqrt(low * high) for low, high in zip(times, [*times[1:], 2 * times[-1]], strict=True)]
        counts = {(factor, limit): _requests(bundle, right, factor, limit) for factor in _FACTORS for limit in limits}
    return [
        Row(
            f"requests until the choice is right, latencies x {factor:g}",
            ", ".join(str(counts[factor, limit]) for limit in limits),
            f"<= {_BAR}",
            all(counts[factor, limit] <= _BAR for limit in limits),
            f"whole engines of {len(times)} levels of MiniLM at 1x32, a limit between each two and above the largest; "
            "refused ones count",
        )
        for factor in _FACTORS
    ]


def _requests(bundle: Bundle, right: HostMeasurement, factor: float, limit_ms: float) -> int:
    """How many requests within ``limit_ms`` are answered, or refused, before the engine that the ``right`` figures
    choose is chosen for good, of a bundle that states ``factor`` times these."""
    keep_measurement(bundle, right)
    with load(bundle.path, threads=CORES) as model:
        wanted = _chosen(model, limit_ms)
    keep_measurement(bundle, _scaled(right, factor))
    feeds = random_feeds(bundle.manifest.inputs, bundle.manifest.engines[0].bucket)
    wrong_until = 0
    with load(bundle.path, threads=CORES) as model:
        for number in range(1, _MOST_REQUESTS + 1):
            if _chosen(model, limit_ms) != wanted:
                wrong_until = number
            with suppress(SelectionError):
                model(feeds, latency_ms=limit_ms)
    return wrong_until


def _chosen(model: ElasticModel, limit_ms: float) -> str | None:
    bucket = model.bundle.manifest.engines[0].bucket
    try:
        return model.choose(bucket.batch, bucket.sequence, latency_ms=limit_ms).engine.id
    except SelectionError:
        return None


def _scaled(measured: HostMeasurement, factor: float) -> HostMeasurement:
    engines = []
    for engine in measured.engines:
        points = tuple(
            replace(point, p50_ms=factor * point.p50_ms, p95_ms=point.p95_ms and factor * point.p95_ms)
            for point in engine.points
        )
        engines.append(replace(engine, points=points))
    return replace(measured, engines=tuple(engines))
