"""The rows of a corpus or of a list of queries, and in which batches a submodel's buckets take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...elastic import Bucket
from ...errors import InputError
from ..inputs.arrays import Array
from ..inputs.check_inputs import InputChecker
from ..model import ElasticModel

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


def batches(lengths: Array, buckets: Iterable[Bucket], truncate: bool) -> Iterator[Array]:
    """Row numbers, batch by batch: rows go together by the least sequence that holds them, as many at a time as the
    largest bucket of that sequence takes.

    Raises InputError, before the first batch, for a row that is longer than every bucket, unless ``truncate``.
    """
    largest: dict[int, int] = {}
    for bucket in buckets:
        largest[bucket.sequence] = max(bucket.batch, largest.get(bucket.sequence, 0))
    sequences = np.array(sorted(largest))
    longest = int(lengths.max())
    if longest > sequences[-1] and not truncate:
        raise InputError(
            f"row {int(lengths.argmax())}: {longest} steps, the largest bucket takes {sequences[-1]}; shorten it, "
            "truncate texts, or compile with a larger bucket"
        )
    group = np.searchsorted(sequences, np.minimum(lengths, sequences[-1]))
    for number, sequence in enumerate(sequences.tolist()):
        rows = np.flatnonzero(group == number)
        for start in range(0, len(rows), largest[sequence]):
            yield rows[start : start + largest[sequence]]
