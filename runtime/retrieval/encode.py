"""Rows to embeddings, by one submodel of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.tensor_spec import TensorSpec
from ...errors import InputError
from ..exits.choice import OFF
from ..inputs.arrays import Array
from ..model import ElasticModel
from ..request import Request
from ..rows import Rows, answers, buckets_of
from .identity import covered
from .nearest import unit

# Called with a stage, how many of its parts are done, and how many there are.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Encoded:
    """``vectors`` ``[N, H]`` float32 of length 1, the ``engines`` that made them, how many rows were ``truncated``.

    ``run_ms`` ``[N]`` is each row's share of the run that it was in, ``flops`` ``[N]`` what a row of that engine costs.
    """

    vectors: Array
    engines: tuple[EngineEntry, ...]
    truncated: int
    run_ms: Array
    flops: Array


def encode(
    model: ElasticModel,
    rows: Rows,
    output: TensorSpec,
    submodel: str,
    *,
    truncate: bool = False,
    progress: Progress | None = None,
) -> Encoded:
    """Embeds every row with ``submodel`` (its id), whole engines only.

    Raises SelectionError before it encodes anything if an engine that may answer has no parity receipt; InputError for
    a row that does not fit, or whose embedding has no direction.
    """
    buckets = buckets_of(model, submodel)
    engines = {e.id: e for e in model.bundle.manifest.engines if e.id in model.residencies}
    for engine in engines.values():
        if engine.submodel == submodel and engine.segment is None:
            covered(model.bundle, engine, output.name)
    count = len(rows.lengths)
    vectors = np.empty((count, int(output.dims[1])), np.float32)
    run_ms, flops = np.empty(count), np.empty(count, np.int64)
    used: dict[str, EngineEntry] = {}
    truncated = done = 0
    for part, answer in answers(model, rows, buckets, truncate=truncate, submodel=submodel, exits=OFF):
        engine = engines[answer.engine]
        used[engine.id] = engine
        vectors[part] = _directions(answer[output.name], output, part)
        run_ms[part] = answer.timings.run / len(part)
        flops[part] = engine.row_flops(int(rows.lengths[part].max()))
        truncated += len(answer.truncated)
        done += len(part)
        if progress is not None:
            progress("encode", done, count)
    return Encoded(vectors, tuple(used[name] for name in sorted(used)), truncated, run_ms, flops)


def encode_in_time(
    model: ElasticModel,
    row: Rows,
    output: TensorSpec,
    request: Request,
    *,
    truncate: bool = False,
) -> tuple[Encoded, str]:
    """Embeds a single row by the submodel that the model chooses as it admits the request, so that no other takes the
    same room; and why that one. Raises as ``encode`` does, and SelectionError where none answers in time.
    """
    inputs = row.take(np.arange(1))
    cut = truncate and row.texts is not None
    answer = model(inputs, exits=OFF, truncate=cut, prompt=row.prompt, **request._asdict())
    engine = next(each for each in model.bundle.manifest.engines if each.id == answer.engine)
    covered(model.bundle, engine, output.name)
    vector = _directions(answer[output.name], output, np.arange(1))
    flops = np.array([engine.row_flops(int(row.lengths[0]))])
    return Encoded(vector, (engine,), len(answer.truncated), np.array([answer.timings.run]), flops), answer.reason


def _directions(rows: Array, output: TensorSpec, numbers: Array) -> Array:
    """``rows`` at length 1; ``numbers`` are what messages call them."""
    found = unit(rows)
    flat = np.flatnonzero(~np.isfinite(found).all(axis=1))
    if len(flat):
        raise InputError(
            f"row {numbers[flat].min()}: output {output.name} is zero or not finite, so it has no direction to compare"
        )
    return found
