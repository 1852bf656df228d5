"""Cost of every engine of a bundle on this host, in each residency, beside what was predicted for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..argument_types import checked, option
from ..bucket import Bucket
from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.open_bundle import Bundle, BundleOrPath, bundle_of
from ..errors import InputError, SelectionError
from ..profiles.backends import BACKENDS
from ..profiles.device_profile import DeviceProfile, read_profile
from ..profiles.host_load import OthersLoad
from ..profiles.probe_host import is_this_host
from ..progress import Progress, counted
from ..runtime.device.threads import threads_or_default
from ..runtime.engines.latencies import predicted_at
from ..runtime.engines.measure import LatencyStats, MemoryUse, measure, memory_use
from ..runtime.engines.memory import engine_needs
from ..runtime.engines.onnxruntime.mapped_cache import drop_mapped, is_mapped
from ..runtime.engines.onnxruntime_gpu.provider import Provider, provider_named
from ..runtime.engines.residency import RESIDENCIES, Residency
from ..runtime.engines.runner import runnable_engines, runner_for
from ..runtime.inputs.arrays import random_feeds
from ..runtime.inputs.options import PROGRESS, SUBMODELS
from ..runtime.load import PROVIDER

if TYPE_CHECKING:
    from ..runtime.engines.onnxruntime.node_times import NodeKind

_SECONDS = 1.0  # of timed runs per engine and residency
_PREDICTED: Residency = "packed"  # what predictions are made for


@dataclass(frozen=True)
class EngineBench:
    """One engine in one residency, run at ``shape``.

    ``predicted_ms`` and ``error`` stand where a prediction was made for this case: ``error`` is predicted over measured
    p50, minus 1. Memory is the host's, and None with a provider: ``device_bytes`` is what the engine then added to the
    GPU's while it was open. ``others_share`` is how much of the CPUs other programs used meanwhile, 0 to 1, None where
    that is not known.
    """

    engine: str
    shape: Bucket
    residency: Residency
    latency_ms: LatencyStats
    memory_bytes: MemoryUse | None
    predicted_ms: float | None = None
    error: float | None = None
    device_bytes: int | None = None
    others_share: float | None = None


@dataclass(frozen=True)
class EngineNodes:
    """One packed engine: over ``runs`` runs at ``shape``, what each kind of node takes, the slowest first."""

    engine: str
    shape: Bucket
    runs: int
    kinds: tuple[NodeKind, ...]


@dataclass(frozen=True)
class NodeProfile:
    """Where the time of engines goes."""

    bundle: str
    threads: int
    engines: tuple[EngineNodes, ...]


@dataclass(frozen=True)
class BundleBench:
    """All measurements; predictions are left out where the bundle was compiled for another device than this host."""

    bundle: str
    profile: str
    compiled_for_this_host: bool
    threads: int
    engines: tuple[EngineBench, ...]


@checked
def bench(
    bundle: BundleOrPath,
    submodels: Sequence[str] = SUBMODELS,
    *,
    at: Bucket | str | None = option(
        "Input shape at which engines of a range run, such as 1x128. Default: where the profile's budgets are judged."
    ),
    provider: str = PROVIDER,
    progress: Progress = PROGRESS,
) -> BundleBench:
    """Latency and memory of every engine of ``submodels`` in each residency.

    As ``nestforge bench``: one engine at a time, memory in own processes. With a ``provider`` engines run there, for
    which nothing was predicted. Engines that were not in the cache of mapped engines before are not in it afterwards.

    Raises SelectionError for a submodel or shape that the bundle does not have, InputError for what is no shape.
    """
    try:
        shape = Bucket.parse(at) if isinstance(at, str) else at
    except ValueError as failure:
        raise InputError(f"at: {failure}") from None
    return _bench_bundle(bundle_of(bundle), submodels, progress, provider_named(provider), shape)


def _bench_bundle(
    bundle: Bundle, submodels: Sequence[str], progress: Progress, provider: Provider | None, at: Bucket | None
) -> BundleBench:
    engines = _engines_of(bundle, submodels, provider)
    profile = _profile(bundle)
    shapes = _shapes(bundle, engines, at)
    here = provider is None and is_this_host(profile)
    threads = threads_or_default(None)
    predicted = {each.engine: predicted_at(each) for each in bundle.build.latencies} if here else {}
    jobs = [(engine, residency) for engine in engines for residency in _residencies(bundle, engine, provider)]
    rows = []
    for engine, residency in counted(progress, "bench", jobs):
        shape = shapes[engine.id]
        if provider is None:
            expected = predicted[engine.id](shape) if engine.id in predicted else None
            rows.append(_bench(bundle, engine, shape, residency, threads, expected))
        else:
            rows.append(_bench_on(provider, bundle, engine, shape, residency))
    return BundleBench(str(bundle.path), profile.name, here, threads, tuple(rows))


def profile_nodes(
    bundle: Bundle, submodels: Sequence[str], progress: Progress, at: Bucket | None = None
) -> NodeProfile:
    """Which kinds of nodes take the time of the engines of ``submodels`` (ids or levels; none means all), of ranges at
    the shape ``at`` as in ``bench``.

    Raises SelectionError for a submodel that the bundle does not have, a shape that no range has, or where no engine is
    ONNX Runtime's.
    """
    from ..runtime.engines.onnxruntime.node_times import node_times

    engines = [engine for engine in _engines_of(bundle, submodels, None) if BACKENDS[engine.backend].own_operators]
    if not engines:
        raise SelectionError(f"bundle {bundle.path}: no engine of it runs in ONNX Runtime, which alone profiles nodes")
    threads, shapes = threads_or_default(None), _shapes(bundle, engines, at)
    rows = []
    for engine in counted(progress, "profile", engines):
        shape = shapes[engine.id]
        rows.append(EngineNodes(engine.id, shape, *node_times(bundle, engine, threads, _SECONDS, shape)))
    return NodeProfile(str(bundle.path), threads, tuple(rows))


def _engines_of(bundle: Bundle, submodels: Sequence[str], provider: Provider | None) -> list[EngineEntry]:
    """The engines of these submodels that can run here; of all for none."""
    wanted = {bundle.manifest.submodel(name).id for name in submodels}
    engines = [engine for engine in runnable_engines(bundle, provider) if not wanted or engine.submodel in wanted]
    if not engines:
        raise SelectionError(f"bundle {bundle.path}: no engine of {', '.join(submodels)} can run here")
    return engines


def _profile(bundle: Bundle) -> DeviceProfile:
    return read_profile(bundle.manifest.provenance.profile, "profile in the manifest")


def _shapes(bundle: Bundle, engines: Sequence[EngineEntry], at: Bucket | None) -> dict[str, Bucket]:
    """The shape that each of ``engines`` runs at, by id."""
    ranges = sorted({engine.bucket for engine in engines if not engine.bucket.is_static})
    if at is not None and not any(bucket.nearest(at) == at for bucket in ranges):
        there = ", ".join(map(str, ranges)) or "none"
        raise SelectionError(f"shape {at}: expected one of a range of this bundle's engines, there is {there}")
    shape = at or _profile(bundle).budget_shape
    return {engine.id: engine.bucket.nearest(shape) for engine in engines}


def _residencies(bundle: Bundle, engine: EngineEntry, provider: Provider | None) -> Sequence[Residency]:
    """Residencies that the runtime gives such an engine: a plan owns its weights on the GPU, and one of int4 a packed
    copy, however they were requested."""
    if provider is not None:
        return ("shared",) if provider.shares else ("packed",)
    (need,) = engine_needs(bundle, [engine])
    return RESIDENCIES if need.can_share else ("packed",)


def _bench(
    bundle: Bundle, engine: EngineEntry, shape: Bucket, residency: Residency, threads: int, predicted_ms: float | None
) -> EngineBench:
    feeds = random_feeds(bundle.manifest.interface_of(engine)[0], shape)
    ours = residency == "mapped" and not is_mapped(bundle, engine)
    try:
        with runner_for(bundle, engine, residency, threads) as runner:
            load = OthersLoad()
            stats = measure(runner, feeds, max_seconds=_SECONDS)
            others = load.share()
        memory = memory_use(bundle.path, [engine.id], residency, threads, shape)
    finally:
        if ours:  # the cache would grow by every engine that was ever measured
            drop_mapped(bundle, engine)
    row = EngineBench(engine.id, shape, residency, stats, memory, others_share=others)
    if residency != _PREDICTED or predicted_ms is None:
        return row
    return replace(row, predicted_ms=predicted_ms, error=predicted_ms / stats.p50 - 1)


def _bench_on(
    provider: Provider, bundle: Bundle, engine: EngineEntry, shape: Bucket, residency: Residency
) -> EngineBench:
    feeds = random_feeds(bundle.manifest.interface_of(engine)[0], shape)
    device = provider.take()  # so that what the device itself takes is not counted
    try:
        before = device.free_bytes()
        with runner_for(bundle, engine, residency, 1, provider) as runner:
            load = OthersLoad()
            stats = measure(runner, feeds, max_seconds=_SECONDS)
            others = load.share()
            used = max(0, before - device.free_bytes())
    finally:
        device.release()
    return EngineBench(engine.id, shape, residency, stats, None, device_bytes=used, others_share=others)
