"""The file of an index: an NPZ archive of plain arrays, as docs/retrieval.md specifies it; nothing in it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from ...strict import parse_json, structure, unstructure
from ...whole_file import write_whole
from ..inputs.arrays import Array
from ..inputs.files import read_npz
from .identity import INDEX_SCHEMA_VERSION, IndexIdentity, identity_problems

# An index is held in memory whole.
MAX_BYTES = 4 * 2**30
_MAX_IDENTITY_BYTES = 2**20
# What rounding to float32 may do to the length of a row.
_LENGTH_TOLERANCE = 1e-3
# Values whose lengths are taken at a time, in float64: 64 MB.
_VALUES_MEASURED_AT_ONCE = 2**23
_REMEDY = "build the index again"


@dataclass(frozen=True, eq=False)
class IndexContent:
    """Contents of the file, see ``Index``."""

    identity: IndexIdentity
    embeddings: Array
    entries: tuple[str, ...] | None
    labels: Array | None


def check_size(rows: int, width: int, entries: Sequence[str] | None) -> None:
    """Raises InputError for an index that would be too large or cannot be written, before any row is encoded."""
    size = rows * (4 * width + 16) + sum(len(_utf8(entry)) for entry in entries or ())
    if size + _MAX_IDENTITY_BYTES > MAX_BYTES:
        raise InputError(f"corpus: {rows} rows make an index of {size} bytes, more than {MAX_BYTES}; split the corpus")


def write_index(path: Path, content: IndexContent) -> None:
    """Writes the file beside ``path`` and renames it. Raises OutputError; InputError for a text that is not Unicode."""
    members: dict[str, Any] = {"identity": _bytes(json.dumps(unstructure(content.identity), sort_keys=True).encode())}
    members["embeddings"] = content.embeddings
    if content.entries is not None:
        raw = [_utf8(entry) for entry in content.entries]
        members["entries"] = _bytes(b"".join(raw))
        members["entry_ends"] = np.cumsum([len(entry) for entry in raw], dtype=np.int64)
    if content.labels is not None:
        members["labels"] = content.labels
    write_whole(path, lambda stream: np.savez(stream, **members), "the index")


def read_index(path: Path) -> IndexContent:
    """Reads and checks the file. Raises InputError for what is damaged or of another format."""
    members = read_npz(path, MAX_BYTES)
    identity = _identity(path, members.pop("identity", None))
    embeddings = _member(path, members, "embeddings", np.float32, (identity.rows, identity.width))
    step = max(1, _VALUES_MEASURED_AT_ONCE // identity.width)
    for start in range(0, len(embeddings), step):
        wrong = np.flatnonzero(~_of_length_one(embeddings[start : start + step]))
        if len(wrong):
            raise InputError(f"{path}: embeddings: row {start + wrong[0]} is not of length 1; {_REMEDY}")
    entries = None if identity.entries == "none" else _entries(path, members, identity.rows)
    labels = _member(path, members, "labels", np.int64, (identity.rows,)) if identity.labelled else None
    if members:
        raise InputError(f"{path}: unknown arrays {', '.join(sorted(members))[:80]}; expected an index; {_REMEDY}")
    return IndexContent(identity, embeddings, entries, labels)


def _identity(path: Path, raw: Array | None) -> IndexIdentity:
    if raw is None or raw.dtype != np.uint8 or raw.ndim != 1 or raw.size > _MAX_IDENTITY_BYTES:
        raise InputError(f"{path}: not an index of `nestforge index`; {_REMEDY}")
    try:
        data = parse_json(raw.tobytes())
    except ValueError as failure:
        raise InputError(f"{path}: identity: not JSON ({failure}); {_REMEDY}") from failure
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is not int or version != INDEX_SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema_version {str(version)[:80]!r}, expected {INDEX_SCHEMA_VERSION}; use the nestforge "
            f"release that wrote it, or {_REMEDY}"
        )
    identity = structure(IndexIdentity, data, f"{path}: identity", lambda problem: InputError(f"{problem}; {_REMEDY}"))
    for problem in identity_problems(identity):
        raise InputError(f"{path}: identity: {problem}; {_REMEDY}")
    return identity


def _of_length_one(rows: Array) -> Array:
    """Whether each row is; in float64, where no float32 overflows. A NaN is not."""
    with np.errstate(invalid="ignore"):
        wide = rows.astype(np.float64)
    near: Array = np.abs(np.sqrt((wide * wide).sum(axis=1)) - 1) < _LENGTH_TOLERANCE
    return near


def _entries(path: Path, members: dict[str, Array], rows: int) -> tuple[str, ...]:
    ends = _member(path, members, "entry_ends", np.int64, (rows,))
    raw = members.pop("entries", None)
    size = -1 if raw is None or raw.dtype != np.uint8 or raw.ndim != 1 else raw.size
    if raw is None or ends[-1] != size or (ends < 0).any() or (np.diff(ends) < 0).any():
        raise InputError(f"{path}: entries: do not fit entry_ends; {_REMEDY}")
    text = raw.tobytes()
    try:
        return tuple(text[start:end].decode() for start, end in pairwise([0, *ends.tolist()]))
    except UnicodeDecodeError as failure:
        raise InputError(f"{path}: entries: not UTF-8; {_REMEDY}") from failure


def _member(path: Path, members: dict[str, Array], name: str, dtype: Any, shape: tuple[int, ...]) -> Array:
    array = members.pop(name, None)
    if array is None or array.dtype != dtype or array.shape != shape:
        found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise InputError(f"{path}: {name}: expected {np.dtype(dtype)} {list(shape)}, got {found}; {_REMEDY}")
    return np.ascontiguousarray(array)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InputError(f"text {text[:60]!r}: half of a surrogate pair, which is no character") from None


def _bytes(raw: bytes) -> Array:
    return np.frombuffer(raw, np.uint8)
