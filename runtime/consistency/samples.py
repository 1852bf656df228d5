"""The inputs on which two models are compared, batch by batch at a bucket's shape: texts, or rows of arrays."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.manifest import Manifest
from ...bundle.roles import Interface, continued_input, ids_input, label_classes, mask_input
from ...errors import InputError
from ..inputs.arrays import Array, InputChecker
from ..inputs.files import LABELS, checked_labels, read_array_file, read_text_file
from ..inputs.text import Encoded, TextEncoder


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs of a bucket's whole shape, or of a range their own; the first ``rows`` rows are samples.

    ``counted`` bool ``[rows, sequence]`` says which positions are theirs, ``labels`` int64 ``[rows]`` their classes, if
    known.
    """

    feeds: Mapping[str, Array]
    rows: int
    counted: Array
    labels: Array | None = None


@dataclass(frozen=True)
class TextSamples:
    """Texts; those longer than the bucket are cut. ``size`` of them, the same in the same order whenever they are asked
    for; ``sha256`` is of their content."""

    encoder: TextEncoder
    texts: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.texts)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256("\n".join(self.texts).encode()).hexdigest()

    def truncated(self, bucket: Bucket) -> int:
        """How many are cut to fit ``bucket``."""
        return len(self.encoder.encode(self.texts, bucket.sequence, truncate=True).truncated)

    def fitting(self, manifest: Manifest, sequence: int) -> TextSamples | None:  # noqa: ARG002  (the encoder knows)
        """Those that have at most ``sequence`` positions; None if there is none."""
        lengths = self.encoder.encode(self.texts, sys.maxsize).lengths
        texts = tuple(text for text, length in zip(self.texts, lengths, strict=True) if length <= sequence)
        return TextSamples(self.encoder, texts) if texts else None

    def batches(self, manifest: Manifest, bucket: Bucket) -> Iterator[Batch]:
        """Every sample once, at ``bucket``'s shape or one in its range. Raises InputError for what does not fit."""
        for start in range(0, len(self.texts), bucket.batch):
            part = self.texts[start : start + bucket.batch]
            feeds, encoded = text_at_bucket(self.encoder, manifest.inputs, part, bucket)
            length = bucket.filled(Bucket(len(part), max(encoded.lengths))).sequence
            counted = np.arange(length) < np.array(encoded.lengths)[:, None]
            yield Batch(feeds, len(part), counted)


@dataclass(frozen=True, eq=False)
class ArraySamples:
    """Rows of arrays by input name, ``[n, ...]`` each, with their classes if known, int64 ``[n]``; see ``TextSamples``.

    Positions count where the mask is not 0; without a mask, up to a row's last token that is not ``pad``.
    """

    feeds: Mapping[str, Array]
    labels: Array | None = None

    @property
    def size(self) -> int:
        return len(next(iter(self.feeds.values())))

    @cached_property
    def sha256(self) -> str:
        content = hashlib.sha256()
        for name, array in sorted(
            [*self.feeds.items(), *([("labels", self.labels)] if self.labels is not None else [])]
        ):
            content.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            content.update(np.ascontiguousarray(array).tobytes())
        return content.hexdigest()

    def truncated(self, bucket: Bucket) -> int:  # noqa: ARG002  (rows that are too long are refused)
        return 0

    def fitting(self, manifest: Manifest, sequence: int) -> ArraySamples | None:
        checker = InputChecker(manifest.inputs)
        shape = checker.shape_of(self.feeds)
        counted = _counted(manifest, self.feeds, shape, shape)
        rows = np.flatnonzero(~counted[:, sequence:].any(axis=1))
        if not len(rows):
            return None
        labels = None if self.labels is None else self.labels[rows]
        return ArraySamples(checker.taken(self.feeds, rows, sequence), labels)

    def take(self, rows: Sequence[int]) -> ArraySamples:
        """The rows of these numbers, in this order."""
        at = np.asarray(rows, np.int64)
        labels = None if self.labels is None else self.labels[at]
        return ArraySamples({name: array[at] for name, array in self.feeds.items()}, labels)

    def row_sha256(self, row: int) -> bytes:
        """SHA-256 of one row's inputs, by which it is given to one part of the data or the other."""
        content = hashlib.sha256()
        for name in sorted(self.feeds):
            content.update(np.ascontiguousarray(self.feeds[name][row]).tobytes())
        return content.digest()

    def batches(self, manifest: Manifest, bucket: Bucket) -> Iterator[Batch]:
        checker = InputChecker(manifest.inputs)
        shape = checker.shape_of(self.feeds)
        if any("sequence" in spec.dims for spec in manifest.inputs) and shape.sequence > bucket.sequence:
            raise InputError(
                f"rows have {shape.sequence} positions, the longest bucket takes {bucket.sequence}; cut them, or "
                "compile with a longer bucket"
            )
        for start in range(0, self.size, bucket.batch):
            # The last rows stand again where a bucket needs more: not every input can be padded with empty rows.
            count = min(bucket.batch, self.size - start)
            filled = bucket.filled(Bucket(count, shape.sequence))
            rows = np.minimum(np.arange(start, start + filled.batch), self.size - 1)
            feeds = checker.filled(
                {name: array[rows] for name, array in self.feeds.items()}, checker.own_shape(filled, filled)
            )
            labels = None if self.labels is None else self.labels[start : start + count]
            yield Batch(feeds, count, _counted(manifest, feeds, shape, filled)[:count], labels)


Samples = TextSamples | ArraySamples


def read_array_samples(path: Path, model: Manifest | Interface) -> ArraySamples:
    """Reads the rows and, for a classifier, their labels.

    Raises InputError for a file that does not fit the model, and for labels where rows have no class.
    """
    for spec in model.inputs:
        if spec.dims[:1] != ("batch",):
            raise InputError(f"{path}: input {spec.name}: {list(spec.dims)} has no rows to tell samples apart by")
    file = read_array_file(path, model.inputs)
    if file.labels is None:
        return ArraySamples(file.feeds)
    classes = label_classes(model)
    if classes is None:
        raise InputError(f"{path}: has {LABELS}, and this model gives rows no class; leave them out")
    return ArraySamples(file.feeds, checked_labels(path, file.labels, file.rows, classes))


def different_rows(samples: ArraySamples) -> list[tuple[bytes, int]]:
    """The first of equal rows each, by the SHA-256 of its inputs and with it: any first part is a sample of all."""
    return sorted({samples.row_sha256(row): row for row in reversed(range(samples.size))}.items())


def keyed_texts(path: Path, error: Callable[[str], Exception]) -> list[tuple[bytes, str]]:
    """The different lines of a UTF-8 file that are not blank, without outer spaces, sorted by their SHA-256, with it.

    Raises ``error(message)`` for a file that ``read_text_file`` refuses.
    """
    return keyed(read_text_file(path, error).splitlines())


def keyed(texts: Sequence[str]) -> list[tuple[bytes, str]]:
    """The different ones of ``texts`` that are not blank, without outer spaces, sorted by their SHA-256, with it.

    Raises InputError for what is no text.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"text: expected a list of texts, got {texts!r:.80}")
    stripped = {text.strip() for text in texts} - {""}
    return sorted((hashlib.sha256(text.encode(errors="surrogatepass")).digest(), text) for text in stripped)


def text_at_bucket(
    encoder: TextEncoder, inputs: Sequence[TensorSpec], texts: Sequence[str], bucket: Bucket
) -> tuple[dict[str, Array], Encoded]:
    """At most ``bucket.batch`` texts, truncated to the bucket and padded as it needs; and how they were encoded.

    Raises InputError if the tokenizer does not fit the model, or the bucket is too short for any text.
    """
    checker = InputChecker(inputs)
    encoded = encoder.encode(texts, bucket.sequence, truncate=True)
    shape = checker.shape_of(encoded.feeds)
    return checker.filled(encoded.feeds, bucket.filled(shape)), encoded


def _counted(manifest: Manifest, feeds: Mapping[str, Array], given: Bucket, bucket: Bucket) -> Array:
    """Positions that count ``[batch, sequence]`` of rows that had ``given.sequence`` before they were padded."""
    if not any("sequence" in spec.dims for spec in manifest.inputs):
        return np.ones((bucket.batch, 1), bool)
    mask, ids = mask_input(manifest), continued_input(manifest)
    if mask is not None and ids == ids_input(manifest):  # else it is of what an encoder reads
        return feeds[mask] != 0
    steps = np.arange(bucket.sequence)
    if ids is None or ids.pad is None:
        return np.broadcast_to(steps < given.sequence, (bucket.batch, bucket.sequence))
    ends = np.where(feeds[ids.name] != ids.pad, steps + 1, 0).max(axis=1)
    return steps < ends[:, None]
