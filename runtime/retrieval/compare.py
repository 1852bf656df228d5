"""The findings of every submodel in an index, beside its savings: the curve from which to choose a query encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...argument_types import checked
from ...bundle.manifest import SubmodelEntry
from ...errors import InputError
from ...progress import Progress
from ..inputs.arrays import Array
from ..inputs.options import PROGRESS, PROMPT, PROMPT_NAME, TRUNCATE
from ..model import ElasticModel
from ..request import Request
from ..rows import Corpus, rows_of
from .identity import embedding_output
from .index import Index, K, checked_labels
from .search import Encoded, encode, nearest

# Queries that each submodel encodes before it is measured.
_WARM_UP_QUERIES = 16


@dataclass(frozen=True)
class SubmodelFigures:
    """One submodel as query encoder, against the universal model, whose index it searches.

    ``recall_at_k`` is the mean share of the universal model's ``k`` nearest rows that are among its own ``k``,
    ``nearest_agreement`` the share of queries whose nearest row is the same, ``accuracy`` the share whose nearest row
    has their label (None without labels). ``flops`` are of one query, ``flops_saved`` and ``parameters_saved`` shares
    of the universal model's. ``ms_per_query`` is the median over queries of their share of a run, measured.
    """

    submodel: str
    labels: tuple[str, ...]
    parameters: int
    parameters_saved: float
    flops: int
    flops_saved: float
    recall_at_k: float
    nearest_agreement: float
    accuracy: float | None
    ms_per_query: float


@dataclass(frozen=True)
class Comparison:
    """The figures of every submodel over ``queries`` queries, the largest first."""

    k: int
    queries: int
    truncated: int
    submodels: tuple[SubmodelFigures, ...]


@checked
def compare_submodels(
    index: Index,
    model: ElasticModel,
    queries: Corpus,
    *,
    k: int = K,
    labels: Array | Sequence[int] | None = None,
    truncate: bool = TRUNCATE,
    progress: Progress = PROGRESS,
    prompt: str | None = PROMPT,
    prompt_name: str | None = PROMPT_NAME,
) -> Comparison:
    """Searches with every submodel of the bundle that may run here. Queries should not be rows of the corpus.

    ``labels`` ``[Q]`` are the queries' classes; the corpus's are in the index. Raises InputError, SelectionError as
    ``Index.search`` does.
    """
    index.check(model.bundle)
    manifest = model.bundle.manifest
    rows = rows_of(model, queries, truncate=truncate, prompt=prompt, prompt_name=prompt_name)
    count = len(rows.lengths)
    wanted = None if labels is None else checked_labels(labels, count)
    if (wanted is None) != (index.labels is None):
        lacking = "the list of queries" if wanted is None else index.name
        raise InputError(f"labels: {lacking} has none; label the corpus and the queries, or neither")
    spec = embedding_output(manifest, index.identity.output)
    resident = {e.submodel for e in manifest.engines if e.segment is None and e.id in model.residencies}
    universal = manifest.submodel(index.identity.submodel)
    others = [entry for entry in manifest.submodels if entry.id in resident and entry.id != universal.id]
    entries = [universal, *sorted(others, key=lambda entry: (-entry.parameters, entry.id))]
    k = min(k, len(index.embeddings))
    found: list[SubmodelFigures] = []
    whole: Encoded | None = None
    best = np.empty((count, k), np.int64)
    truncated = 0
    for number, entry in enumerate(entries):
        progress("submodels", number, len(entries))
        request = Request(submodel=entry.id)
        encode(model, rows.first(_WARM_UP_QUERIES), spec, request, truncate=truncate)
        encoded = encode(model, rows, spec, request, truncate=truncate)
        ids, _ = nearest(index.embeddings, encoded.vectors, k)
        if whole is None:
            best, whole = ids, encoded
        truncated = max(truncated, encoded.truncated)
        hit = None if wanted is None or index.labels is None else float(np.mean(index.labels[ids[:, 0]] == wanted))
        found.append(_figures(entry, universal, encoded, whole, ids, best, hit))
    progress("submodels", len(entries), len(entries))
    return Comparison(k, count, truncated, tuple(found))


def _figures(
    entry: SubmodelEntry,
    universal: SubmodelEntry,
    encoded: Encoded,
    whole: Encoded,
    ids: Array,
    best: Array,
    accuracy: float | None,
) -> SubmodelFigures:
    common = [len(np.intersect1d(mine, theirs)) for mine, theirs in zip(ids, best, strict=True)]
    return SubmodelFigures(
        submodel=entry.id,
        labels=entry.labels,
        parameters=entry.parameters,
        parameters_saved=1 - entry.parameters / max(1, universal.parameters),
        flops=round(float(encoded.flops.mean())),
        flops_saved=1 - float(encoded.flops.sum()) / max(1.0, float(whole.flops.sum())),
        recall_at_k=float(np.mean(common)) / best.shape[1],
        nearest_agreement=float(np.mean(ids[:, 0] == best[:, 0])),
        accuracy=accuracy,
        ms_per_query=float(np.median(encoded.run_ms)),
    )
