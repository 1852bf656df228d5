"""The gate of an engine that keeps a cache: its logits and its cache against one pass of the PyTorch submodel.

Whatever pieces a text is given in, at every position the logits must be those that the model has there in its own full
pass, in float64, and the cache must hold the keys and values of that pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...elastic import Submodel
from ...errors import ParityError
from ...exporters.cached_form import CachedForm
from ...runtime.bundle.manifest import EngineEntry, GenerationEntry, TensorSpec
from ...runtime.inputs.arrays import Arrays
from ..build.emitted import Emitted
from ..parity.cases import Case
from ..parity.divergence import NOWHERE, first_divergence
from ..parity.engine_verdict import tolerance_of
from ..parity.judge import JudgedOutputs, Verdict, judge
from ..parity.reference import Reference, replayed
from ..parity.references import References
from .cached_cases import Batch, cases_of


def judged_specs(entry: GenerationEntry) -> tuple[TensorSpec, ...]:
    """What a text of ``S`` tokens gives: logits, and keys and values of each layer."""
    kept = [
        TensorSpec(f"{kind}_{number}", "float32", ("batch", layer.heads, "sequence", layer.size))
        for number, layer in enumerate(entry.layers)
        for kind in ("key", "value")
    ]
    return (TensorSpec("logits", "float32", ("batch", "sequence", entry.vocabulary)), *kept)


def cached_reference(references: References, submodel: Submodel, form: CachedForm) -> Reference:
    """The model's own pass over whole texts."""
    return references.of(submodel).viewed(form.recorded, judged_specs(form.entry))


def judge_cached(
    references: References, form: CachedForm, engine: EngineEntry, batches: Sequence[Batch], found: Sequence[Arrays]
) -> Verdict:
    """What ``engine`` answered to ``batches`` against the pass of its submodel."""
    universal, cases = references.universal, cases_of(batches)
    reference = cached_reference(references, universal.spec.parse(engine.submodel), form)
    outputs, limit = JudgedOutputs(reference.specs), tolerance_of(engine, universal)
    return judge(replayed(reference, cases), found, cases, outputs, engine.precision, limit)


def require_cached_parity(
    references: References,
    form: CachedForm,
    engine: Emitted,
    folder: Path,
    batches: Sequence[Batch],
    verdict: Verdict,
) -> None:
    """Raises ParityError where the ``verdict`` is broken, naming the first module that diverges in one run over the
    text. ``folder`` holds the weight store."""
    broken, entry = verdict.broken, engine.entry
    if broken is None:
        return
    limit = tolerance_of(entry, references.universal)
    problem = f"engine {entry.id}: {broken.describe()}"
    if verdict.unprovable:
        raise ParityError(problem)
    submodel = references.universal.spec.parse(entry.submodel)
    reference = cached_reference(references, submodel, form)
    case = next(case for case in cases_of(batches) if case.name == broken.failed_case)
    once = Case(case.name, _in_one_run(form.entry, case.feeds["input_ids"]))
    where = first_divergence(
        engine.proof_graph,
        engine.template.module_outputs,
        reference,
        once,
        limit,
        folder,
        reference.bound(case.feeds, None, {}),
    )
    if where == NOWHERE:
        where = "no module in one run over the text, so that what is wrong lies between runs"
    raise ParityError(f"{problem}; allowed {limit.rule}; first to diverge: {where}")


def _in_one_run(entry: GenerationEntry, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs of an engine that gets the whole text ``ids`` [1, S] at once, with an empty cache."""
    tokens = ids.shape[1]
    places = np.arange(tokens, dtype=np.int64)
    feeds = {"input_ids": ids, "position_ids": places[None], "logits_at": places}
    for number, layer in enumerate(entry.layers):
        for kind in ("key", "value"):
            feeds[f"past_{kind}_{number}"] = np.zeros((1, layer.heads, tokens, layer.size), np.float32)
    return feeds
