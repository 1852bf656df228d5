"""That what fills a bucket changes no answer, of a class that nobody has read: it may pass over its own mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.manifest import Proof
from ...errors import ParityError
from ...runtime.inputs.arrays import Array, Arrays
from .compare import size_of
from .reading import in_float64
from .references import References

# Share of an output's size. Both sides are PyTorch in float64; sums of other lengths round otherwise.
_LIMIT = 1e-9


def prove_padding(references: References) -> Iterator[Proof]:
    """One row by itself, shorter than its bucket, against the same row in the filled bucket, of every bucket that
    requests are filled up to, and of every range of several rows and lengths. Raises ParityError where the answers
    differ."""
    source = references.universal.source
    whole = references.of(source.spec.universal())
    for bucket, cases in references.cases.items():
        shape, inputs = bucket.smallest, source.signature.inputs
        if any(spec.pad is None for spec in inputs):
            continue
        # In a range, rows of one request that differ in length fill each other.
        some = [one for one in cases if _mixes_lengths(inputs, one.feeds)] or (cases if shape.tokens > 1 else [])
        if not some:
            continue
        case = min(some, key=lambda one: one.tokens)
        alone, filled, kept = _row(inputs, case.feeds)
        with in_float64(whole.module):
            own, together = whole.run(alone)[0], whole.run(filled)[0]
        worst = 0.0
        for spec, first, second in zip(whole.specs, own, together, strict=True):
            difference = float(np.abs(first.numpy() - _first(spec, second.numpy(), kept)).max())
            scale = size_of(first.numpy())
            if not difference <= _LIMIT * scale:  # no number fails too
                one_row = Bucket(1, bucket.sequence, None, 1)
                free = one_row if bucket.sequence > 1 else Bucket(bucket.batch, 1, 1)
                raise ParityError(
                    f"bucket {bucket}: what fills a request up to it changes output {spec.name} by {difference:.3g}: "
                    f"the class lets padding through; ask for shapes that nothing fills, such as {free}"
                )
            worst = max(worst, difference / scale)
        yield Proof("padding", bucket.label, 1, worst, _LIMIT)


def _mixes_lengths(inputs: tuple[TensorSpec, ...], feeds: Arrays) -> bool:
    tokens = [feeds[spec.name].shape for spec in inputs if spec.dims[:2] == ("batch", "sequence")]
    return any(rows > 1 and length > 1 for rows, length, *_ in tokens)


def _row(inputs: tuple[TensorSpec, ...], feeds: Arrays) -> tuple[dict[str, Array], dict[str, Array], int]:
    """The first row cut by a third, all rows with the first filled in place of that, and the tokens that it keeps."""
    length = max(
        (feeds[spec.name].shape[spec.dims.index("sequence")] for spec in inputs if "sequence" in spec.dims), default=1
    )
    kept = max(1, length - max(1, length // 3))
    alone: dict[str, Array] = {}
    filled: dict[str, Array] = {}
    for spec in inputs:
        array = feeds[spec.name].copy()
        if spec.dims[:2] == ("batch", "sequence"):
            if spec.row_needs is not None:
                array[0] = 1
            array[0, kept:] = spec.pad
        filled[spec.name] = array
        alone[spec.name] = _first(spec, array, kept)
    return alone, filled, kept


def _first(spec: TensorSpec, array: Array, kept: int) -> Array:
    """The first row up to the tokens that it keeps."""
    cut: Mapping[str | int, slice] = {"batch": slice(1), "sequence": slice(kept)}
    return np.ascontiguousarray(array[tuple(cut.get(dim, slice(None)) for dim in spec.dims)])
