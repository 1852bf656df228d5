"""The commands that use a bundle, as functions: what each does between its options and what it prints.

A ``bundle`` is the path of one; where a model answers it may also be a model that is open, and stays so. ``progress``
is called with a stage, how many of its parts are done, and how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..argument_types import checked
from ..bucket import Bucket
from ..bundle.device_files.measurements import keep_measurement, read_measurements
from ..bundle.open_bundle import open_bundle
from ..errors import InputError
from ..progress import Progress, silent
from ..runtime.calibrate.calibrate import calibrate as calibrate_exits
from ..runtime.calibrate.drafts import DEFAULT_TEXTS
from ..runtime.calibrate.drafts import calibrate_drafts as measure_drafts
from ..runtime.calibrate.simulate import parse_budget
from ..runtime.consistency.measure import Consistency, check_consistency
from ..runtime.engines.measure import BundleMeasurement, measure_bundle
from ..runtime.engines.onnxruntime_gpu.provider import provider_named
from ..runtime.engines.residency import Residency
from ..runtime.exits.calibration import CalibratedPolicy, keep_policy, read_calibration
from ..runtime.exits.policy import Compare, Rule
from ..runtime.generation.draft_gains import HostDrafts, keep_drafts, read_drafts
from ..runtime.inputs.arrays import Array
from ..runtime.load import load
from ..runtime.model import ElasticModel
from ..runtime.retrieval import Comparison, Found, Index, compare_submodels
from ..runtime.rows import Corpus
from ..whole_file import require_writable
from .bundle_bench import BundleBench, bench_bundle
from .traffic_bench import TrafficBench, bench_traffic

PathOf = str | os.PathLike[str]


@checked
def index(
    bundle: PathOf | ElasticModel,
    corpus: Corpus,
    *,
    ids: Sequence[str] | None = None,
    labels: Array | Sequence[int] | None = None,
    output: str | None = None,
    truncate: bool = False,
    prompt: str | None = None,
    prompt_name: str | None = None,
    residency: Residency | Literal["auto"] = "auto",
    progress: Progress = silent,
) -> Index:
    """An index of ``corpus``, texts or arrays by input name, by the universal model; ``.save(path)`` writes it.

    As ``nestforge index``; arguments are those of ``Index.build``, which says what it raises.
    """
    with _opened(bundle, residency) as model:
        return Index.build(
            model,
            corpus,
            ids=ids,
            labels=None if labels is None else np.asarray(labels),
            output=output,
            truncate=truncate,
            progress=progress,
            prompt=prompt,
            prompt_name=prompt_name,
        )


@checked
def search(
    bundle: PathOf | ElasticModel,
    index: PathOf | Index,
    queries: Corpus | str,
    *,
    k: int = 10,
    residency: Residency | Literal["auto"] = "auto",
    **asked: Any,
) -> Found:
    """The ``k`` rows of ``index`` that are nearest to each query, by any submodel.

    As ``nestforge search``; ``asked`` are ``budget``, ``latency_ms``, ``memory_mb``, ``submodel``, ``deadline_ms``,
    ``truncate``, ``prompt`` and ``prompt_name`` of ``Index.search``, which says what it raises.
    """
    opened = _index(index)
    with _opened(bundle, residency) as model:
        return opened.search(model, queries, k=k, **asked)


@checked
def compare(
    bundle: PathOf | ElasticModel,
    index: PathOf | Index,
    queries: Corpus,
    *,
    k: int = 10,
    labels: Array | Sequence[int] | None = None,
    truncate: bool = False,
    prompt: str | None = None,
    prompt_name: str | None = None,
    progress: Progress = silent,
) -> Comparison:
    """The findings of every submodel in ``index``, beside its savings: ``nestforge search --compare``.

    ``labels`` ``[Q]`` are the queries' classes, of an index that has labels. Raises as ``search`` does.
    """
    opened = _index(index)
    with _opened(bundle, "auto") as model:
        return compare_submodels(
            opened,
            model,
            queries,
            k=k,
            labels=None if labels is None else np.asarray(labels),
            truncate=truncate,
            progress=progress,
            prompt=prompt,
            prompt_name=prompt_name,
        )


@checked
def measure(
    bundle: PathOf,
    *,
    threads: int | None = None,
    memory_mb: float | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> BundleMeasurement:
    """Times a bundle's engines on this host, and keeps the figures in the bundle, by which the runtime then chooses.

    As ``nestforge measure``. Raises MeasurementError on a host that is too busy, unless ``force``; OutputError where
    figures cannot be kept; and as ``load`` does.
    """
    opened = open_bundle(bundle)
    read_measurements(opened)  # unreadable ones are refused before any work
    require_writable(opened.path, "measurements")
    result = measure_bundle(opened, progress, threads=threads, memory_mb=memory_mb, force=force)
    keep_measurement(opened, result.measurement)
    return result


@checked
def bench(
    bundle: PathOf,
    submodels: Sequence[str] = (),
    *,
    at: Bucket | str | None = None,
    provider: str = "cpu",
    progress: Progress = silent,
) -> BundleBench:
    """Latency and memory of every engine of ``submodels`` (labels or ids; none means all) in each residency.

    As ``nestforge bench``; ``at`` is the shape, such as ``1x128``, at which engines of a range run. Raises
    SelectionError for a submodel or shape that the bundle does not have, InputError for what is no shape.
    """
    try:
        shape = Bucket.parse(at) if isinstance(at, str) else at
    except ValueError as failure:
        raise InputError(f"at: {failure}") from None
    return bench_bundle(open_bundle(bundle), submodels, progress, provider_named(provider), shape)


@checked
def bench_requests(
    bundle: PathOf | ElasticModel,
    submodels: Sequence[str] = (),
    *,
    texts: Sequence[str] | None = None,
    concurrency: int = 1,
    task: str | None = None,
    progress: Progress = silent,
) -> TrafficBench:
    """Requests from ``concurrency`` threads at once, to one of ``submodels`` after the other (none means all).

    As ``nestforge bench --text``: each of ``texts`` is one, else random arrays. Raises InputError for texts where the
    bundle has no tokenizer, SelectionError for a submodel or task that it does not have.
    """
    with _opened(bundle, "auto") as model:
        return bench_traffic(model, submodels, concurrency, progress, texts, task)


@checked
def consistency(
    bundle: PathOf,
    *,
    text: PathOf | Sequence[str] | None = None,
    data: PathOf | None = None,
    submodels: Sequence[str] = (),
    threads: int | None = None,
    progress: Progress = silent,
) -> Consistency:
    """How much of the universal model ``submodels`` (labels or ids; none means all) keep on your own data.

    As ``nestforge consistency``: one of ``text``, a UTF-8 file with a text a line or texts, and ``data``, an NPZ file.
    Raises InputError for data that do not fit or are too few, SelectionError for what cannot be compared.
    """
    lines = Path(text) if isinstance(text, str | os.PathLike) else text
    rows = None if data is None else Path(data)
    return check_consistency(
        open_bundle(bundle), text=lines, data=rows, submodels=submodels, threads=threads, progress=progress
    )


@checked
def calibrate(
    bundle: PathOf,
    data: PathOf,
    budget: str,
    *,
    batch: int = 1,
    submodel: str | None = None,
    name: str | None = None,
    default: bool = True,
    compare: Compare | None = None,
    rule: Rule = "per_row",
    truncate: bool = False,
    progress: Progress = silent,
) -> CalibratedPolicy:
    """Thresholds of exits for a ``budget`` such as ``mean_latency_ms<=5``, kept in the bundle's calibration.

    As ``nestforge calibrate``: ``data`` is an NPZ or JSONL file of rows like those to be answered; with ``default``
    requests for this submodel follow the policy without asking for it. Raises InputError for data or a budget that do
    not fit, SelectionError for a model without exits or a budget out of reach, OutputError where nothing can be kept.
    """
    limit = parse_budget(budget)
    opened = open_bundle(bundle)
    read_calibration(opened)  # one that cannot be read is refused before any work
    require_writable(opened.path, "a calibration")
    policy = calibrate_exits(
        opened,
        Path(data),
        limit,
        batch=batch,
        submodel=submodel,
        name=name,
        compare=compare,
        rule=rule,
        truncate=truncate,
        progress=progress,
    )
    keep_policy(opened, policy, default)
    return policy


@checked
def calibrate_drafts(
    bundle: PathOf,
    texts: Sequence[str] = DEFAULT_TEXTS,
    *,
    submodel: str | None = None,
    progress: Progress = silent,
) -> HostDrafts:
    """Acceptance and times of drafts of a bundle that generates, kept in it by host: ``nestforge calibrate`` of such a
    bundle.

    Raises InputError for a bundle that does not generate, OutputError where nothing can be kept.
    """
    opened = open_bundle(bundle)
    read_drafts(opened)  # those that cannot be read are refused before any work
    require_writable(opened.path, "a calibration")
    found = measure_drafts(opened, texts, submodel=submodel, progress=progress)
    keep_drafts(opened, found)
    return found


def _opened(
    bundle: PathOf | ElasticModel, residency: Residency | Literal["auto"]
) -> AbstractContextManager[ElasticModel]:
    return nullcontext(bundle) if isinstance(bundle, ElasticModel) else load(bundle, residency=residency)


def _index(index: PathOf | Index) -> Index:
    return index if isinstance(index, Index) else Index.load(index)
