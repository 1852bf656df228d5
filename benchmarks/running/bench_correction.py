"""A bundle whose latencies are wrong by a factor of five: how many requests until the right submodel answers."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory

from ... import ElasticModel, SelectionError, load
from ...bundle.device_files.measurements import HostMeasurement, keep_measurement
from ...bundle.open_bundle import Bundle, open_bundle
from ...compiler.work.clock import silent
from ...profiles.host_load import OthersLoad
from ...runtime.engines.measure import measure_bundle
from ...runtime.inputs.feeds import random_feeds
from ..harness import Row
from ..subjects import CORES, minilm_levels_bundle

_FACTORS = (5.0, 1 / 5)
_MOST_REQUESTS = 100
_IN_A_ROW = 5
_BAR = 50


def run() -> list[Row]:
    """Limits lie between the times of each two neighbouring levels, and above the largest."""
    with TemporaryDirectory() as folder:
        path = Path(shutil.copytree(minilm_levels_bundle(), Path(folder) / "wrong.bundle"))
        bundle = open_bundle(path)
        others = OthersLoad()
        right = measure_bundle(bundle, silent, threads=CORES, force=True).measurement
        times = sorted(engine.points[0].p50_ms for engine in right.engines)
        limits = [sqrt(low * high) for low, high in zip(times, [*times[1:], 2 * times[-1]], strict=True)]
        counts = {(factor, limit): _requests(bundle, right, factor, limit) for factor in _FACTORS for limit in limits}
        busy = others.share()
    return [
        Row(
            f"requests until the choice is right, latencies x {factor:g}",
            ", ".join(str(counts[factor, limit]) for limit in limits),
            f"<= {_BAR}",
            all(counts[factor, limit] <= _BAR for limit in limits),
            f"whole engines of {len(times)} levels of MiniLM at 1x32, a limit between each two and above the largest, "
            f"refused ones count; right is what the bundle chooses with measured figures, {_IN_A_ROW} times in a row; "
            f"others used {'?' if busy is None else f'{busy:.0%}'} of the CPUs",
        )
        for factor in _FACTORS
    ]


def _requests(bundle: Bundle, right: HostMeasurement, factor: float, limit_ms: float) -> int:
    """How many requests within ``limit_ms`` a bundle that states ``factor`` times the ``right`` figures answers or
    refuses before it chooses as one with these, which answers the same requests: several times in a row, so that it
    did not so by chance."""
    feeds = random_feeds(bundle.manifest.inputs, bundle.manifest.engines[0].bucket)
    keep_measurement(bundle, right)
    with load(bundle.path, threads=CORES) as reference:
        keep_measurement(bundle, _scaled(right, factor))
        with load(bundle.path, threads=CORES) as wrong:
            alike = 0
            for number in range(_MOST_REQUESTS):
                alike = alike + 1 if _chosen(wrong, limit_ms) == _chosen(reference, limit_ms) else 0
                if alike == _IN_A_ROW:
                    return number + 1 - _IN_A_ROW
                for model in (reference, wrong):
                    with suppress(SelectionError):
                        model(feeds, latency_ms=limit_ms)
    return _MOST_REQUESTS


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
