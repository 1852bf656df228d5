"""Samples from an NPZ file: an array per input, rows first, and perhaps ``labels``."""

from __future__ import annotations

from pathlib import Path

from ...bundle.manifest import Manifest
from ...bundle.roles import Interface, label_classes
from ...errors import InputError
from ..inputs.files import LABELS, checked_labels, read_array_file
from .samples import ArraySamples


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
