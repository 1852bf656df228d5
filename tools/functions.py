"""The commands that use a bundle, as functions: what each does between its options and what it prints.

A ``bundle`` is the path of one; where a model answers it may also be a model that is open, and stays so. ``progress``
is called with a stage, how many of its parts are done, and how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ..argument_types import again, checked, option
from ..bucket import Bucket
from ..bundle.device_files.measurements import Measurements
from ..bundle.open_bundle import open_bundle
from ..errors import InputError
from ..progress import Progress
from ..runtime.calibrate.calibrate import calibrate as calibrate_exits
from ..runtime.calibrate.drafts import DEFAULT_TEXTS
from ..runtime.calibrate.drafts import calibrate_drafts as measure_drafts
from ..runtime.calibrate.simulate import parse_budget
from ..runtime.consistency.measure import Consistency, check_consistency
from ..runtime.engines.measure import BundleMeasurement, measure_bundle
from ..runtime.engines.onnxruntime_gpu.provider import provider_named
from ..runtime.engines.residency import Residency
from ..runtime.exits.calibration import CalibratedPolicy, Calibration, save_policy
from ..runtime.exits.policy import Compare, Rule
from ..runtime.generation.draft_gains import DraftCalibration, HostDrafts
from ..runtime.inputs.options import (
    BUDGET,
    DEADLINE_MS,
    MEMORY_MB,
    PROGRESS,
    PROMPT,
    PROMPT_NAME,
    SUBMODEL,
    SUBMODELS,
    TASK,
    THREADS,
    TRUNCATE,
)
from ..runtime.load import PROVIDER, RESIDENCY, opened
from ..runtime.model import ElasticModel
from ..runtime.retrieval.index import INDEX_DIMENSIONS, QUERY_MS, Found, Index, K
from ..runtime.rows import Corpus
from ..whole_file import require_writable
from .bundle_bench import BundleBench, bench_bundle
from .traffic_bench import TrafficBench, bench_traffic

PathOf = str | os.PathLike[str]
_LARGEST = again(SUBMODEL, help="Submodel, by label or id. Default: the largest.")


@checked
def search(
    bundle: PathOf | ElasticModel,
    index: PathOf | Index,
    queries: Corpus | str,
    *,
    k: int = K,
    budget: str | None = BUDGET,
    latency_ms: float | None = QUERY_MS,
    memory_mb: float | None = MEMORY_MB,
    submodel: str | None = SUBMODEL,
    deadline_ms: float | None = DEADLINE_MS,
    dimensions: int | None = INDEX_DIMENSIONS,
    truncate: bool = TRUNCATE,
    prompt: str | None = PROMPT,
    prompt_name: str | None = PROMPT_NAME,
    residency: Residency | Literal["auto"] = RESIDENCY,
) -> Found:
    """The ``k`` rows of ``index`` that are nearest to each query, by any submodel.

    As ``nestforge search``; raises as ``Index.search`` does.
    """
    own = index if isinstance(index, Index) else Index.load(index)
    with opened(bundle, residency) as model:
        return own.search(
            model,
            queries,
            k=k,
            budget=budget,
            latency_ms=latency_ms,
            memory_mb=memory_mb,
            submodel=submodel,
            deadline_ms=deadline_ms,
            dimensions=dimensions,
            truncate=truncate,
            prompt=prompt,
            prompt_name=prompt_name,
        )


@checked
def measure(
    bundle: PathOf,
    *,
    threads: int | None = THREADS,
    memory_mb: float | None = again(
        MEMORY_MB, help="Memory limit, in MB, under which engines are held; those left out are named."
    ),
    force: bool = option("Measure beside busy programs too; such figures are marked as noisy.", False),
    progress: Progress = PROGRESS,
) -> BundleMeasurement:
    """Times a bundle's engines on this host, and keeps the figures in the bundle, by which the runtime then chooses.

    As ``nestforge measure``. Raises MeasurementError on a host that is too busy, unless ``force``; OutputError where
    figures cannot be saved; and as ``load`` does.
    """
    opened = open_bundle(bundle)
    Measurements.read(opened)  # unreadable ones are refused before any work
    require_writable(opened.path, "measurements")
    result = measure_bundle(opened, progress, threads=threads, memory_mb=memory_mb, force=force)
    Measurements.save(opened, result.measurement)
    return result


@checked
def bench(
    bundle: PathOf,
    submodels: Sequence[str] = SUBMODELS,
    *,
    at: Bucket | str | None = option(
        "Input shape at which engines of a range run, such as 1x128. Default: where the profile's budgets are judged."
    ),
    provider: str = PROVIDER,
    progress: Progress = PROGRESS,
) -> BundleBench:
    """Latency and memory of every engine of ``submodels`` in each residency.

    As ``nestforge bench``. Raises SelectionError for a submodel or shape that the bundle does not have, InputError for
    what is no shape.
    """
    try:
        shape = Bucket.parse(at) if isinstance(at, str) else at
    except ValueError as failure:
        raise InputError(f"at: {failure}") from None
    return bench_bundle(open_bundle(bundle), submodels, progress, provider_named(provider), shape)


@checked
def bench_requests(
    bundle: PathOf | ElasticModel,
    submodels: Sequence[str] = SUBMODELS,
    *,
    texts: Sequence[str] | None = None,
    concurrency: int = option("Number of threads that send requests at once.", 1, min=1, max=256, metavar="N"),
    task: str | None = TASK,
    progress: Progress = PROGRESS,
) -> TrafficBench:
    """Requests from several threads at once, to one of ``submodels`` after the other.

    As ``nestforge bench --text``: each of ``texts`` is one, else random arrays. Raises InputError for texts where the
    bundle has no tokenizer, SelectionError for a submodel or task that it does not have.
    """
    with opened(bundle) as model:
        return bench_traffic(model, submodels, concurrency, progress, texts, task)


@checked
def consistency(
    bundle: PathOf,
    *,
    text: PathOf | Sequence[str] | None = option("UTF-8 file of texts, one a line.", metavar="FILE"),
    data: PathOf | None = option(
        "NPZ file with an array per input, rows first, and perhaps 'labels' of a classifier.", metavar="FILE"
    ),
    submodels: Sequence[str] = SUBMODELS,
    threads: int | None = THREADS,
    progress: Progress = PROGRESS,
) -> Consistency:
    """How much of the universal model ``submodels`` keep on your own data.

    As ``nestforge consistency``: one of ``text``, which may be a list of texts too, and ``data``. Raises InputError for
    data that do not fit or are too few, SelectionError for what cannot be compared.
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
    batch: int = option("Number of rows per request.", 1, min=1),
    submodel: str | None = _LARGEST,
    name: str | None = option("Name of the policy; one of the same name is replaced. Default: the budget."),
    default: bool = option("Make the policy the submodel's default, which requests follow without asking.", True),
    compare: Compare | None = option("Comparison of entropy and threshold. Default: the model's."),
    rule: Rule = option("Exit rule: each row by itself, or the whole batch together.", "per_row"),
    truncate: bool = TRUNCATE,
    progress: Progress = PROGRESS,
) -> CalibratedPolicy:
    """Thresholds of exits for a ``budget`` such as ``mean_latency_ms<=5``, kept in the bundle's calibration.

    As ``nestforge calibrate``: ``data`` is an NPZ or JSONL file of rows like those to be answered. Raises InputError
    for data or a budget that do not fit, SelectionError for a model without exits or a budget out of reach, OutputError
    where nothing can be saved.
    """
    limit = parse_budget(budget)
    opened = open_bundle(bundle)
    Calibration.read(opened)  # one that cannot be read is refused before any work
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
    save_policy(opened, policy, default)
    return policy


@checked
def calibrate_drafts(
    bundle: PathOf,
    texts: Sequence[str] = DEFAULT_TEXTS,
    *,
    submodel: str | None = _LARGEST,
    progress: Progress = PROGRESS,
) -> HostDrafts:
    """Acceptance and times of drafts of a bundle that generates, kept in it by host: ``nestforge calibrate`` of such a
    bundle.

    Raises InputError for a bundle that does not generate, OutputError where nothing can be saved.
    """
    opened = open_bundle(bundle)
    DraftCalibration.read(opened)  # those that cannot be read are refused before any work
    require_writable(opened.path, "a calibration")
    found = measure_drafts(opened, texts, submodel=submodel, progress=progress)
    DraftCalibration.save(opened, found)
    return found
