"""Rows for a model in an NPZ file of any origin: an array per input, rows first, and perhaps ``labels``."""

import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.files import stream_sha256
from ...errors import InputError
from ...outside_file import open_file
from .arrays import Array, InputChecker

# Limits of a file, and of what an NPZ file unpacks to.
MAX_BYTES = 256 * 2**20
MAX_ROWS = 50_000
LABELS = "labels"


@dataclass(frozen=True, eq=False)
class ArrayFile:
    """``feeds`` by input name, ``[rows, ...]`` each, and what stood under ``labels``; ``sha256`` is the file's."""

    feeds: Mapping[str, Array]
    labels: Array | None
    rows: int
    sha256: str


def read_array_file(
    path: Path, inputs: Sequence[TensorSpec], max_bytes: int = MAX_BYTES, max_rows: int = MAX_ROWS
) -> ArrayFile:
    """Reads the rows; nothing in the file is executed.

    Raises InputError for a file that cannot be read or is too large, for arrays that do not fit ``inputs``, and for
    no rows at all or too many.
    """
    sha256 = _file_sha256(path, max_bytes)
    arrays = read_npz(path, max_bytes)
    labels = arrays.pop(LABELS, None)
    if any(not len(array) for array in arrays.values() if array.ndim):
        raise InputError(f"{path}: has no rows")
    try:
        shape = InputChecker(inputs).shape_of(arrays)
    except InputError as failure:
        raise InputError(f"{path}: {failure}") from failure
    check_rows(path, shape.batch, max_rows)
    return ArrayFile(arrays, labels, shape.batch, sha256)


def check_rows(path: Path, rows: int, max_rows: int = MAX_ROWS) -> None:
    """Raises InputError for no rows at all, or too many."""
    if not rows:
        raise InputError(f"{path}: has no rows")
    if rows > max_rows:
        raise InputError(f"{path}: {rows} rows, more than the {max_rows} allowed; some thousand are enough")


def checked_labels(path: Path, labels: Array, rows: int, classes: int) -> Array:
    """Labels as int64 ``[rows]``. Raises InputError unless they are whole numbers in ``0..classes - 1``, one a row."""
    if labels.dtype.kind not in "iu" or labels.shape != (rows,):
        raise InputError(
            f"{path}: {LABELS}: expected {rows} whole numbers, got {labels.dtype} of shape {list(labels.shape)}"
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise InputError(f"{path}: {LABELS}: row {wrong[0]} has {labels[wrong[0]]}, expected 0..{classes - 1}")
    return labels.astype(np.int64)


def _file_sha256(path: Path, max_bytes: int) -> str:
    """SHA-256 of a file of at most ``max_bytes``. Raises InputError for one that is larger or cannot be read."""
    with open_file(path, InputError) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise InputError(f"{path}: {size} bytes, more than the {max_bytes} allowed; some thousand rows are enough")
        try:
            return stream_sha256(file)
        except OSError as failure:
            raise InputError(f"{path}: cannot be read ({failure.strerror or failure})") from failure


def read_npz(path: Path, max_bytes: int) -> dict[str, Array]:
    """The arrays of an NPZ file, of up to ``max_bytes`` unpacked. Raises InputError for anything else."""
    with open_file(path, InputError) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked <= max_bytes:
                file.seek(0)
                with np.load(file, allow_pickle=False) as members:
                    arrays = dict(members)
                if all(isinstance(array, np.ndarray) for array in arrays.values()):
                    return arrays
        except Exception as failure:  # zipfile, decompressors and numpy's header parser have errors of their own
            raise _refusal(path) from failure
    if unpacked > max_bytes:
        raise InputError(f"{path}: unpacks to {unpacked} bytes, more than the {max_bytes} allowed; send fewer rows")
    raise _refusal(path)  # other files among the arrays, which numpy hands out as bytes


def _refusal(path: Path) -> InputError:
    return InputError(f"{path}: expected an NPZ file of plain arrays, as numpy.savez writes it")


MAX_TEXT_BYTES = 2**30
_BLOCK_BYTES = 2**20
_EXPECTED = "expected a UTF-8 text file with one text per line"


def read_text_file(path: Path, error: Callable[[str], Exception] = InputError) -> str:
    """Text of a UTF-8 file of at most ``MAX_TEXT_BYTES`` holds.

    Raises ``error(message)`` for a file that is missing, larger or not UTF-8, and for folders, pipes and devices, which
    it never waits for.
    """
    try:
        with open_file(path, lambda problem: error(f"{problem}; {_EXPECTED}")) as file:
            raw = bytearray()  # to be read at once, memory for the most allowed would be taken
            while len(raw) <= MAX_TEXT_BYTES and (block := file.read(_BLOCK_BYTES)):
                raw += block
    except OSError as failure:
        raise error(f"{path}: cannot be read ({failure.strerror or failure}); {_EXPECTED}") from failure
    if len(raw) > MAX_TEXT_BYTES:
        raise error(f"{path}: more than the {MAX_TEXT_BYTES} bytes allowed; split it")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(f"{path}: line {raw.count(10, 0, failure.start) + 1}: not UTF-8; {_EXPECTED}") from failure
