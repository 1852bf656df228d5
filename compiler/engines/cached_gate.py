"""The gate of a KV-cache engine: its logits and its cache against one pass of the PyTorch submodel.

Whatever pieces a text is given in, at every position the logits must be what the model has there in its own full
pass, in float64, and the cache must hold the keys and values of that pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import GenerationEntry, present, window_of
from ...elastic import Submodel
from ...exporters.parts import CachedSpec
from ...runtime.generation.cache import Source
from ...runtime.inputs.arrays import Array, Arrays
from ..parity.cached_cases import Batch, PromptRoutes, cases_of, judged_specs
from ..parity.cases import Case
from ..parity.compare import Tolerance
from ..parity.engine_verdict import NOWHERE, ProofRun, first_divergence, require, tolerance_of
from ..parity.judge import JudgedOutputs, Replayed, Verdict, judge
from ..parity.reference import Reference, replayed
from ..parity.references import References


def cached_reference(reference: Reference, form: CachedSpec) -> Reference:
    """The own pass over whole texts of the model of ``reference``."""
    return reference.viewed(form.recorded, judged_specs(form.entry))


def cached_answers(references: References, submodel: Submodel, form: CachedSpec, batches: Sequence[Batch]) -> Replayed:
    """That of ``submodel`` on ``batches``, made once for all engines and stages."""
    return references.of_texts(submodel, cases_of(batches), partial(cached_reference, form=form))


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
    submodel, limit = references.universal.spec.parse(engine.submodel), tolerance_of(engine, references.universal)
    if routes is None:
        expected = cached_answers(references, submodel, form, batches)
    else:
        reference = cached_reference(references.of(submodel), form)
        expected = replayed(reference, cases_of(batches), *routes, limit.atol)
    return judge_rows(expected, form, batches, found, limit)


def judge_rows(
    expected: Replayed, form: CachedSpec, batches: Sequence[Batch], found: Sequence[Arrays], limit: Tolerance
) -> Verdict:
    """Rows that were ``found`` against the ``expected`` ones; what is said of routes is in the receipt of the engine
    that took them."""
    verdict = judge(expected, found, cases_of(batches), JudgedOutputs(judged_specs(form.entry)), limit)
    return replace(verdict, routes=None)


def require_cached_parity(
    subject: str,
    verdict: Verdict,
    run: ProofRun,
    reference: Callable[[], Reference],
    form: CachedSpec,
    batches: Sequence[Batch],
    limit: Tolerance,
    read: Mapping[str, Sequence[Array]] | None = None,
    routes: PromptRoutes | None = None,
    capacity: int | None = None,
) -> None:
    """``require``, of the ``verdict`` on texts, by one run over a whole one; ``reference`` is made where that is wrong.

    ``read`` is what an encoder returned of each prompt, by the name of its case, and ``routes`` are what it took there;
    ``capacity`` is that of a cache of one size.
    """

    def diverges(failed: str) -> str:
        number, case = next((n, case) for n, case in enumerate(cases_of(batches)) if case.name == failed)
        if form.states:  # an engine takes one token
            case = Case(case.name, {name: array[:, :1] for name, array in case.feeds.items()})
        feeds = _in_one_run(form.entry, case, None if read is None else read[failed], capacity)
        entries, taken = (routes.routes, routes.taken[number]) if routes else (None, {})
        own = reference()
        bound = partial(own.run, case.feeds, entries, taken)
        where = first_divergence(run, own, Case(failed, feeds), limit, bound)
        if where == NOWHERE:
            return "no module in one run over the text, so that what is wrong lies between runs"
        return where

    require(subject, verdict, limit.rule, diverges)


def _in_one_run(
    entry: GenerationEntry, case: Case, read: Sequence[Array] | None, capacity: int | None
) -> dict[str, np.ndarray]:
    """The inputs of an engine that gets the whole text of ``case`` [1, S] at once, with an empty cache."""
    ids = case.feeds["input_ids"]
    tokens = ids.shape[1]
    places = np.arange(tokens, dtype=np.int64)
    feeds: dict[str, np.ndarray] = {"input_ids": ids, "position_ids": places[None], "logits_at": places}
    if window_of(entry.layers) is not None:
        feeds["window_places"] = np.zeros(1, np.int64)
    if read is not None:
        source = Source(tuple(read), np.array([read[0].shape[3]]))
        feeds |= {**source.counts, **source.named()}
    for number, layer in present(entry.layers):
        for kind in ("key", "value"):
            feeds[f"past_{kind}_{number}"] = np.zeros((1, layer.heads, capacity or tokens, layer.size), np.float32)
    for number, shape in enumerate(entry.states):
        feeds[f"past_state_{number}"] = np.zeros((1, *shape), np.float32)
    return feeds
