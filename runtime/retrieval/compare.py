"""The findings of every submodel in an index, beside its savings: the curve from which to choose a query encoder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...argument_types import checked
from ...bundle.manifest import SubmodelEntry
from ...bundle.roles import embedding_output
from ...errors import InputError
from ...progress import Progress, counted
from ..inputs.arrays import Array
from ..inputs.options import PROGRESS, PROMPT, PROMPT_NAME, TRUNCATE
from ..load import opened
from ..model import ElasticModel
from ..request import Request
from ..rows import Corpus, rows_of
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
def compare(
    bundle: str | os.PathLike[str] | ElasticModel,
    index: str | os.PathLike[str] | Index,
    queries: Corpus,
    *,
    k: int = K,
    labels: Array | Sequence[int] | None = None,
    truncate: bool = TRUNCATE,
    prompt: str | None = PROMPT,
    prompt_name: str | None = PROMPT_NAME,
    progress: Progress = PROGRESS,
) -> Comparison:
    """The findings of every submodel here in ``index``, beside its savings: ``nestforge search --compare``.

    A bundle and an index are given by path or open. Queries should not be rows of the corpus; ``labels`` ``[Q]`` are
    their classes, of an index that has labels. Raises InputError, SelectionError as ``Index.search`` does.
    """
    own = index if isinstance(index, Index) else Index.load(index)
    with opened(bundle) as model:
        own.check(model.bundle)
        rows = rows_of(model, queries, truncate=truncate, prompt=prompt, prompt_name=prompt_name)
        manifest = model.bundle.manifest
        count = len(rows.lengths)
        wanted = None if labels is None else checked_labels(labels, count)
        if (wanted is None) != (own.labels is None):
            lacking = "the list of queries" if wanted is None else own.name
            raise InputError(f"labels: {lacking} has none; label the corpus and the queries, or neither")
        spec, width = embedding_output(manifest, own.identity.output), own.identity.width
        resident = {e.submodel for e in manifest.engines if e.segment is None and e.id in model.residencies}
        universal = manifest.submodel(own.identity.submodel)
        others = [entry for entry in manifest.submodels if entry.id in resident and entry.id != universal.id]
        entries = [universal, *sorted(others, key=lambda entry: (-entry.parameters, entry.id))]
        k = min(k, len(own.embeddings))
        found: list[SubmodelFigures] = []
        whole: Encoded | None = None
        best = np.empty((count, k), np.int64)
        truncated = 0
        for entry in counted(progress, "submodels", entries):
            request = Request(submodel=entry.id)
            encode(model, rows.first(_WARM_UP_QUERIES), spec, request, width, truncate=truncate)
            encoded = encode(model, rows, spec, request, width, truncate=truncate)
            ids, _ = nearest(own.embeddings, encoded.vectors, k)
            if whole is None:
                best, whole = ids, encoded
            truncated = max(truncated, encoded.truncated)
            hit = None if wanted is None or own.labels is None else float(np.mean(own.labels[ids[:, 0]] == wanted))
            found.append(_figures(entry, universal, encoded, whole, ids, best, hit))
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
