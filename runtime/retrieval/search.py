"""Rows to embeddings, by one submodel of a model; and the nearest rows of a corpus by cosine, exactly: those that a
search in float64 over every row would find."""

from dataclasses import dataclass

import numpy as np

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.tensor_spec import TensorSpec
from ...errors import InputError
from ...progress import Progress, silent
from ..exits.choice import OFF
from ..inputs.arrays import Array
from ..model import ElasticModel
from ..request import Request
from ..rows import Rows, answers, buckets_of
from .identity import covered


@dataclass(frozen=True, eq=False)
class Encoded:
    """``vectors`` ``[N, H]`` float32 of length 1, the ``engines`` that made them, how many rows were ``truncated``, and
    why these engines answered.

    ``run_ms`` ``[N]`` is each row's share of the run that it was in, ``flops`` ``[N]`` what a row of that engine costs.
    """

    vectors: Array
    engines: tuple[EngineEntry, ...]
    truncated: int
    run_ms: Array
    flops: Array
    reason: str


def encode(
    model: ElasticModel,
    rows: Rows,
    output: TensorSpec,
    request: Request,
    width: int,
    *,
    truncate: bool = False,
    progress: Progress = silent,
) -> Encoded:
    """Embeds every row, in ``width`` numbers, with the submodel (its id) that ``request`` names, whole engines only; or
    a single row with the one that the model chooses as it admits a request with a deadline, so that no other takes the
    same room.

    Raises SelectionError if an engine that may answer has no parity receipt, before it encodes anything where the
    submodel is named; InputError for a row that does not fit, or whose embedding has no direction.
    """
    request.check_one_selector()
    engines = {e.id: e for e in model.bundle.manifest.engines if e.id in model.residencies and e.segment is None}
    able = [engine for engine in engines.values() if request.submodel in (None, engine.submodel)]
    buckets = [engine.bucket for engine in able] if request.submodel is None else buckets_of(model, request.submodel)
    if request.submodel is not None:
        for engine in able:
            covered(model.bundle, engine, output.name)
    count = len(rows.lengths)
    vectors = np.empty((count, width), np.float32)
    run_ms, flops = np.empty(count), np.empty(count, np.int64)
    used: dict[str, EngineEntry] = {}
    truncated, done, reason = 0, 0, ""
    for part, answer in answers(model, rows, buckets, truncate=truncate, exits=OFF, **request._asdict()):
        engine = engines[answer.engine]
        covered(model.bundle, engine, output.name)
        used[engine.id] = engine
        vectors[part] = _directions(answer[output.name][:, :width], output, part)
        run_ms[part] = answer.timings.run / len(part)
        flops[part] = engine.row_flops(int(rows.lengths[part].max()))
        truncated, done, reason = truncated + len(answer.truncated), done + len(part), answer.reason
        progress("encode", done, count)
    return Encoded(vectors, tuple(used[name] for name in sorted(used)), truncated, run_ms, flops, reason)


def _directions(rows: Array, output: TensorSpec, numbers: Array) -> Array:
    """``rows`` at length 1; ``numbers`` are what messages call them."""
    found = unit(rows)
    flat = np.flatnonzero(~np.isfinite(found).all(axis=1))
    if len(flat):
        raise InputError(
            f"row {numbers[flat].min()}: output {output.name} is zero or not finite, so it has no direction to compare"
        )
    return found


# Scores held at a time (float32) and values of a block that is scored again in float64: 64 MB each.
_SCORES_AT_ONCE = 2**24
_VALUES_AT_ONCE = 2**23


def nearest(corpus: Array, queries: Array, k: int) -> tuple[Array, Array]:
    """Row numbers ``[Q, k]`` int64 and scores ``[Q, k]`` float32, the best first; of equal ones the lowest row first.

    ``corpus`` ``[N, H]`` and ``queries`` ``[Q, H]`` are float32 rows of length 1. With fewer than ``k`` rows all of
    them are returned. Matrix products round differently by where in a block a row lies, so they only narrow the rows
    down; rows that may be among the best are scored again, each by the same sum in float64.
    """
    k = min(k, len(corpus))
    ids = np.empty((len(queries), k), np.int64)
    scores = np.empty((len(queries), k), np.float32)
    step = max(1, _SCORES_AT_ONCE // len(corpus))
    # Each score is off by at most width * 2^-24: so may be the k-th best, and a row that belongs before it.
    margin = 2.5 * corpus.shape[1] * 2.0**-24
    for start in range(0, len(queries), step):
        part = queries[start : start + step]
        rough = part @ corpus.T
        worst = np.partition(rough, len(corpus) - k, axis=1)[:, len(corpus) - k]
        for number, query in enumerate(part):
            rows = np.flatnonzero(rough[number] >= worst[number] - margin)
            exact = _exact(corpus, rows, query)
            best = np.lexsort((rows, -exact))[:k]
            ids[start + number], scores[start + number] = rows[best], exact[best]
    return ids, scores


def unit(rows: Array) -> Array:
    """``rows`` ``[N, H]`` divided by their Euclidean length, float32; NaN where that is 0 or not finite."""
    wide = rows.astype(np.float64)
    length = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
    length[(length == 0) | ~np.isfinite(length)] = np.nan
    return (wide / length).astype(np.float32)


def _exact(corpus: Array, rows: Array, query: Array) -> Array:
    """Inner products of ``corpus[rows]`` with ``query`` in float64, equal for equal rows."""
    wide = query.astype(np.float64)
    step = max(1, _VALUES_AT_ONCE // len(query))
    parts = [(corpus[rows[start : start + step]] * wide).sum(axis=1) for start in range(0, len(rows), step)]
    return np.concatenate(parts)
