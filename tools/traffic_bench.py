"""Requests to one model as its callers send them: several threads at once, and texts of a file, each a request."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from threading import Barrier
from time import perf_counter

import numpy as np

from ..argument_types import checked, option
from ..bucket import Bucket
from ..errors import SelectionError
from ..profiles.host_load import OthersLoad
from ..progress import Progress, counted
from ..runtime.engines.measure import LatencyStats, latency_stats
from ..runtime.inputs.arrays import Array, random_feeds
from ..runtime.inputs.options import PROGRESS, SUBMODELS, TASK
from ..runtime.load import opened
from ..runtime.model import ElasticModel

_SECONDS = 2.0  # of requests per submodel, at least
_MIN_REQUESTS = 20  # for each thread
_MOST_TEXTS = 1000
_WARM_UPS = 16
_SEED = 0
_FIRST_BAND = 16
_Sent = str | Mapping[str, Array]


@dataclass(frozen=True)
class Band:
    """The texts of ``least`` to ``most`` tokens, and their share of all."""

    least: int
    most: int
    texts: int
    share: float


@dataclass(frozen=True)
class Lengths:
    """Tokens of the texts that were sent, special tokens and the default prompt included: ``texts`` of
    the ``found`` ones."""

    texts: int
    found: int
    median: float
    p95: float
    longest: int
    bands: tuple[Band, ...]


@dataclass(frozen=True)
class Traffic:
    """The answers of one submodel: ``per_second`` counts requests of all threads, ``latency_ms`` is that of a request
    from call to answer. ``truncated`` counts texts that were cut, each as often as it was sent. ``others_share`` is how
    much of the CPUs other programs used meanwhile, 0 to 1, None where that is not known."""

    submodel: str
    requests: int
    per_second: float
    latency_ms: LatencyStats
    truncated: int
    others_share: float | None = None


@dataclass(frozen=True)
class TrafficBench:
    """All submodels under the same requests; without ``lengths`` these were random arrays of an engine's shape."""

    bundle: str
    concurrency: int
    threads: int
    lengths: Lengths | None
    submodels: tuple[Traffic, ...]


@checked
def bench_requests(
    bundle: str | os.PathLike[str] | ElasticModel,
    submodels: Sequence[str] = SUBMODELS,
    *,
    texts: Sequence[str] | None = None,
    concurrency: int = option("Number of threads that send requests at once.", 1, min=1, max=256, metavar="N"),
    task: str | None = TASK,
    progress: Progress = PROGRESS,
) -> TrafficBench:
    """Requests from several threads at once, to one of ``submodels`` after the other.

    As ``nestforge bench --text``. 1000 ``texts`` at most are drawn, the same each time; every one is sent,
    in a mixed order, and again until two seconds have passed. A text that is longer than the submodel takes is cut.
    Without texts random arrays are sent. Raises InputError for texts where the bundle has no tokenizer, SelectionError
    for a submodel or task that the bundle does not have or cannot run here.
    """
    with opened(bundle) as model:
        manifest = model.bundle.manifest
        resident = {e.submodel for e in manifest.engines if e.segment is None and e.id in model.residencies}
        if task is not None:
            model.tasks.open(task)  # read before anything is timed
            resident &= set(model.tasks.entries[task].submodels)
        requested = [manifest.submodel(name).id for name in submodels]
        wanted = list(dict.fromkeys(requested)) or [entry.id for entry in manifest.submodels if entry.id in resident]
        for name in wanted:
            if name not in resident:
                of_task = f" for task {task}" if task is not None else ""
                raise SelectionError(
                    f"bundle {model.bundle.path}: submodel {name} has no engine{of_task} that can run here"
                )
        sent: list[str] = []
        if texts is not None:
            sent = random.Random(_SEED).sample(list(texts), min(len(texts), _MOST_TEXTS))  # noqa: S311
        counts = model.token_counts(sent) if sent else []
        by_length = [text for _, text in sorted(zip(counts, sent, strict=True))]
        warm_ups = by_length[:: max(1, -(-len(by_length) // _WARM_UPS))]
        rows = []
        for name in counted(progress, "traffic", wanted):
            arrays = [] if sent else [_arrays_for(model, name)]
            rows.append(_traffic(model, name, sent or arrays, warm_ups or arrays, concurrency, task))
        lengths = lengths_of(counts, len(texts)) if texts else None
        return TrafficBench(str(model.bundle.path), concurrency, model.threads, lengths, tuple(rows))


def lengths_of(counts: Sequence[int], found: int) -> Lengths:
    """Distribution of token counts, in bands that double: up to 16, 32, 64 and so on."""
    middle, high = np.percentile(counts, [50, 95])
    bands, least, most = [], 1, _FIRST_BAND
    while least <= max(counts):
        within = sum(least <= tokens <= most for tokens in counts)
        bands.append(Band(least, most, within, within / len(counts)))
        least, most = most + 1, 2 * most
    return Lengths(len(counts), found, float(middle), float(high), max(counts), tuple(bands))


def _arrays_for(model: ElasticModel, submodel: str) -> dict[str, Array]:
    """Random arrays of the shape of the engine that takes the longest row, of a range its fewest rows."""
    bucket = model.choose(1, model.longest_sequence(1, submodel), submodel=submodel).engine.bucket
    return random_feeds(model.bundle.manifest.inputs, Bucket(bucket.smallest.batch, bucket.sequence))


def _traffic(
    model: ElasticModel,
    submodel: str,
    requests: Sequence[_Sent],
    warm_ups: Sequence[_Sent],
    concurrency: int,
    task: str | None,
) -> Traffic:
    def ask(request: _Sent) -> int:
        """Number of texts of the request that were cut."""
        return len(model(request, submodel=submodel, truncate=isinstance(request, str), task=task).truncated)

    for request in warm_ups:
        ask(request)
    enough = max(len(requests), _MIN_REQUESTS * concurrency)
    load = OthersLoad()
    found, seconds = _from_threads(ask, requests, enough, concurrency)
    others = load.share()
    stats = latency_stats([ms for ms, _ in found])
    return Traffic(submodel, stats.runs, stats.runs / seconds, stats, sum(cut for _, cut in found), others)


def _from_threads(
    ask: Callable[[_Sent], int], requests: Sequence[_Sent], enough: int, concurrency: int
) -> tuple[list[tuple[float, int]], float]:
    """Milliseconds of each request and what ``ask`` returned, and the seconds of all: ``enough`` of them, and on until
    ``_SECONDS`` have passed. Each thread sends its next one as soon as it has an answer."""
    numbers, start = count(), Barrier(concurrency)

    def caller() -> tuple[list[tuple[float, int]], float, float]:
        mine = []
        start.wait()
        began = perf_counter()
        while (number := next(numbers)) < enough or perf_counter() - began < _SECONDS:
            sent_at = perf_counter()
            cut = ask(requests[number % len(requests)])
            mine.append((1e3 * (perf_counter() - sent_at), cut))
        return mine, began, perf_counter()

    with ThreadPoolExecutor(concurrency) as threads:
        done = [each.result() for each in [threads.submit(caller) for _ in range(concurrency)]]
    found = [one for mine, _, _ in done for one in mine]
    return found, max(ended for _, _, ended in done) - min(began for _, began, _ in done)
