"""The gate of a KV-cache engine: its logits and its cache against one pass of the PyTorch submodel.

Whatever pieces a text is given in, at every position the logits must be what the model has there in its own full
pass, in float64, and the cache must hold the keys and values of that pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import GenerationEntry, window_of
from ...elastic import Submodel
from ...errors import ParityError
from ...exporters.parts import CachedSpec
from ...runtime.generation.cache import Source
from ...runtime.inputs.arrays import Array, Arrays
from ..parity.cached_cases import Batch, PromptRoutes, cases_of, judged_specs
from ..parity.cases import Case
from ..parity.compare import Tolerance
from ..parity.engine_verdict import NOWHERE, first_divergence, tolerance_of
from ..parity.judge import JudgedOutputs, Verdict, judge
from ..parity.reference import Reference, replayed
from ..parity.references import References


def cached_reference(references: References, submodel: Submodel, form: CachedSpec) -> Reference:
    """The model's own pass over whole texts."""
    return references.of(submodel).viewed(form.recorded, judged_specs(form.entry))


def judge_cached(
    references: References,
    form: CachedSpec,
    engine: EngineEntry,
    batches: Sequence[Batch],
    found: Sequence[Arrays],
    routes: PromptRoutes | None = None,
) -> Verdict:
    """The answers of ``engine`` to ``batches`` against the pass of its submodel, with the ``routes`` that the encoder
    before it took."""
    universal = references.universal
    reference = cached_reference(references, universal.spec.parse(engine.submodel), form)
    return judge_rows(reference, batches, found, tolerance_of(engine, universal), routes)


def judge_rows(
    reference: Reference,
    batches: Sequence[Batch],
    found: Sequence[Arrays],
    limit: Tolerance,
    routes: PromptRoutes | None = None,
) -> Verdict:
    """Rows that were ``found`` against ``reference``. ``routes`` are another
    engine's, whose receipt has what is said of them."""
    cases, (entries, taken) = cases_of(batches), routes or PromptRoutes((), ())
    expected = replayed(reference, cases, entries, taken, limit.atol)
    verdict = judge(expected, found, cases, JudgedOutputs(reference.specs), limit)
    return replace(verdict, routes=None)


@dataclass(frozen=True)
class CachedRun:
    """A run and its reference: a ``graph`` whose weight store lies in ``folder``, and whose value
    ``modules[name]`` is what the module ``name`` of ``reference`` returns. ``read`` is what an encoder returned of each
    prompt, by the name of its case, and ``routes`` are what it took there; ``capacity`` is that of a cache of one
    size."""

    subject: str
    graph: bytes
    modules: Mapping[str, str]
    folder: Path
    reference: Reference
    read: Mapping[str, Sequence[Array]] | None = None
    capacity: int | None = None
    routes: PromptRoutes | None = None


def require_cached_parity(
    run: CachedRun, form: CachedSpec, batches: Sequence[Batch], verdict: Verdict, limit: Tolerance
) -> None:
    """Raises ParityError where the ``verdict`` is broken, naming the first module that diverges in one run over the
    text."""
    broken = verdict.broken
    if broken is None:
        return
    if verdict.unprovable:
        raise ParityError(f"{run.subject}: {broken.describe()}")
    number, case = next((n, case) for n, case in enumerate(cases_of(batches)) if case.name == broken.failed_case)
    once = Case(case.name, _in_one_run(form.entry, case, run))
    entries, taken = (run.routes.routes, run.routes.taken[number]) if run.routes else (None, {})
    bound = run.reference.bound(case.feeds, entries, taken)
    where = first_divergence(run.graph, run.modules, run.reference, once, limit, run.folder, bound)
    if where == NOWHERE:
        where = "no module in one run over the text, so that what is wrong lies between runs"
    raise ParityError(f"{run.subject}: {broken.describe()}; allowed {limit.rule}; first to diverge: {where}")


def _in_one_run(entry: GenerationEntry, case: Case, run: CachedRun) -> dict[str, np.ndarray]:
    """The inputs of an engine that gets the whole text of ``case`` [1, S] at once, with an empty cache."""
    ids = case.feeds["input_ids"]
    tokens = ids.shape[1]
    places = np.arange(tokens, dtype=np.int64)
    feeds: dict[str, np.ndarray] = {"input_ids": ids, "position_ids": places[None], "logits_at": places}
    if window_of(entry.layers) is not None:
        feeds["window_places"] = np.zeros(1, np.int64)
    if run.read is not None:
        found = run.read[case.name]
        source = Source(tuple(found), np.array([found[0].shape[3]]))
        feeds |= {**source.counts, **source.named()}
    for number, layer in enumerate(entry.layers):
        for kind in ("key", "value"):
            feeds[f"past_{kind}_{number}"] = np.zeros((1, layer.heads, run.capacity or tokens, layer.size), np.float32)
    return feeds
