"""Any number of rows, such as a corpus or a list of queries, answered in batches that a submodel's buckets take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..bucket import Bucket
from ..errors import InputError, SelectionError
from .answer import Answer
from .candidates import batches
from .inputs.arrays import Array, InputChecker
from .model import ElasticModel

Corpus = Sequence[str] | Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class Rows:
    """Texts behind ``prompt``, or arrays by input name with rows first; ``lengths`` ``[N]`` are the steps of each row,
    1 where the model has no sequence."""

    data: tuple[str, ...] | Mapping[str, Array]
    lengths: Array
    prompt: str | None = None

    @property
    def texts(self) -> tuple[str, ...] | None:
        return self.data if isinstance(self.data, tuple) else None

    def take(self, rows: Array) -> list[str] | dict[str, Array]:
        """The rows of these numbers as inputs of a model."""
        if isinstance(self.data, tuple):
            return [self.data[row] for row in rows]
        return {name: array[rows] for name, array in self.data.items()}

    def first(self, count: int) -> Rows:
        """The first ``count`` rows, or all of fewer."""
        if isinstance(self.data, tuple):
            return Rows(self.data[:count], self.lengths[:count], self.prompt)
        return Rows({name: array[:count] for name, array in self.data.items()}, self.lengths[:count])


def rows_of(
    model: ElasticModel,
    corpus: Corpus,
    *,
    truncate: bool = False,
    prompt: str | None = None,
    prompt_name: str | None = None,
) -> Rows:
    """The rows of ``corpus``; texts stand behind a prompt as in a call of the model, and are as long as they are cut to
    where ``truncate``. Raises InputError for none, or for what the model does not take."""
    if isinstance(corpus, Mapping):
        if prompt is not None or prompt_name is not None:
            raise InputError("prompt: applies to text only; its tokens belong into the arrays")
        inputs = model.bundle.manifest.inputs
        whole = [spec.name for spec in inputs if spec.dims[:1] != ("batch",)]
        if whole:
            raise InputError(f"input {whole[0]}: has no batch, so its rows cannot be encoded one by one")
        shape = InputChecker(inputs).shape_of(corpus)
        return Rows(dict(corpus), np.full(shape.batch, shape.sequence, np.int64))
    if isinstance(corpus, str) or not isinstance(corpus, Sequence) or not corpus:
        raise InputError(f"corpus: expected texts or arrays by name, got {corpus!r:.80}")
    wrong = next((row for row, text in enumerate(corpus) if not isinstance(text, str)), None)
    if wrong is not None:
        raise InputError(f"text {wrong}: expected text, got {corpus[wrong]!r:.80}")
    before = model.prompt(prompt, prompt_name)
    lengths = np.array(model.token_counts(corpus, before), np.int64)
    text = model.bundle.manifest.text
    if truncate and text is not None and text.max_tokens is not None:
        lengths = np.minimum(lengths, text.max_tokens)
    return Rows(tuple(corpus), lengths, before)


def answers(
    model: ElasticModel,
    rows: Rows,
    buckets: Sequence[Bucket],
    *,
    truncate: bool = False,
    most: int | None = None,
    **requested: Any,
) -> Iterator[tuple[Array, Answer]]:
    """The numbers of the rows of a batch, and the model's answer to them, until every row has one.

    ``buckets`` are those of the submodel that ``requested``, further arguments of the call, names. Texts are cut where
    ``truncate``; a batch has at most ``most`` rows. Raises as ``batches`` and a call of the model do.
    """
    cut = truncate and rows.texts is not None
    for part in batches(rows.lengths, buckets, cut, most):
        yield part, model(rows.take(part), truncate=cut, prompt=rows.prompt, **requested)


def buckets_of(model: ElasticModel, submodel: str) -> list[Bucket]:
    """The buckets at which ``submodel`` (its id) may run here. Raises SelectionError if there is none."""
    entries = model.bundle.manifest.engines
    found = [e.bucket for e in entries if e.submodel == submodel and e.segment is None and e.id in model.residencies]
    if not found:
        raise SelectionError(f"submodel {submodel} has no engine here (left out by memory_mb, or for another backend)")
    return found
