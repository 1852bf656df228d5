"""The commands that keep something in a bundle, and search, as functions.

A ``bundle`` is the path of one; where a model answers it may also be a model that is open, and stays so. ``progress``
is called with a stage, how many of its parts are done, and how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ..argument_types import again, checked, option
from ..bundle.device_files.measurements import Measurements
from ..bundle.open_bundle import open_bundle
from ..progress import Progress
from ..runtime.calibrate.calibrate import calibrate as calibrate_exits
from ..runtime.calibrate.drafts import DEFAULT_TEXTS
from ..runtime.calibrate.drafts import calibrate_drafts as measure_drafts
from ..runtime.calibrate.simulate import parse_budget
from ..runtime.engines.measure import BundleMeasurement, measure_bundle
from ..runtime.engines.residency import Residency
from ..runtime.exits.policy import CalibratedPolicy, Calibration, Compare, Rule, save_policy
from ..runtime.generation.draft_gains import DraftCalibration, HostDrafts
from ..runtime.inputs import options
from ..runtime.load import RESIDENCY, opened
from ..runtime.model import ElasticModel
from ..runtime.retrieval.index import INDEX_DIMENSIONS, QUERY_MS, Found, Index, K
from ..runtime.rows import Corpus
from ..whole_file import require_writable

PathOf = str | os.PathLike[str]
_LARGEST = again(options.SUBMODEL, help="Submodel, by label or id. Default: the largest.")


@checked
def search(
    bundle: PathOf | ElasticModel,
    index: PathOf | Index,
    queries: Corpus | str,
    *,
    k: int = K,
    budget: str | None = options.BUDGET,
    latency_ms: float | None = QUERY_MS,
    memory_mb: float | None = options.MEMORY_MB,
    submodel: str | None = options.SUBMODEL,
    deadline_ms: float | None = options.DEADLINE_MS,
    dimensions: int | None = INDEX_DIMENSIONS,
    truncate: bool = options.TRUNCATE,
    prompt: str | None = options.PROMPT,
    prompt_name: str | None = options.PROMPT_NAME,
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
    threads: int | None = options.THREADS,
    memory_mb: float | None = again(
        options.MEMORY_MB, help="Memory limit, in MB, under which engines are held; those left out are named."
    ),
    force: bool = option("Measure beside busy programs too; such figures are marked as noisy.", False),
    progress: Progress = options.PROGRESS,
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
    truncate: bool = options.TRUNCATE,
    progress: Progress = options.PROGRESS,
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
    progress: Progress = options.PROGRESS,
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
