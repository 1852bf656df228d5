"""Rows to calibrate on: arrays in an NPZ file, or texts in a JSONL file, with a label each or none at all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...bundle.open_bundle import Bundle
from ...errors import InputError
from ...outside_file import parse_json, read_file
from ..inputs.arrays import Array, InputChecker
from ..inputs.files import MAX_BYTES, MAX_ROWS, check_rows, checked_labels, read_array_file
from ..inputs.text import TextEncoder, require_characters

_HELD_OUT_ONE_IN = 3
LEAST_ROWS_TO_SPLIT = 50


@dataclass(frozen=True, eq=False)
class LabelledData:
    """``feeds`` by input name, ``[n, ...]`` each; ``lengths`` ``[n]`` are the steps that count, ``labels`` ``[n]`` the
    classes, if known. ``truncated`` counts texts that were cut. ``sha256`` is the file's."""

    feeds: Mapping[str, Array]
    lengths: Array
    labels: Array | None
    truncated: int
    sha256: str

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def take(self, rows: Array) -> LabelledData:
        """The rows of these numbers, in this order."""
        feeds = {name: array[rows] for name, array in self.feeds.items()}
        labels = None if self.labels is None else self.labels[rows]
        return LabelledData(feeds, self.lengths[rows], labels, self.truncated, self.sha256)


def read_data(path: Path, bundle: Bundle, longest: int, truncate: bool = False) -> LabelledData:
    """Reads ``.npz`` (an array per input, rows first, and perhaps ``labels``) or ``.jsonl`` (``{"text": ..., "label":
    ...}`` a line) for a bundle with exits, rows of up to ``longest`` steps. Nothing in a file is executed.

    Raises InputError, with the line of a text file, for what does not fit the bundle.
    """
    readers = {".npz": _read_arrays, ".jsonl": _read_texts}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: expected a file that ends in {' or '.join(readers)}")
    return reader(path, bundle, longest, truncate)


def split(data: LabelledData) -> tuple[LabelledData, LabelledData | None]:
    """The rows to calibrate on, and about one in three to check on, chosen by their content: equal rows stay together,
    and a row keeps its side when others come or go. With fewer than ``LEAST_ROWS_TO_SPLIT`` all calibrate."""
    names = sorted(data.feeds)
    held_out = np.array([_hash(data, names, row) % _HELD_OUT_ONE_IN == 0 for row in range(data.rows)])
    if data.rows < LEAST_ROWS_TO_SPLIT or held_out.all() or not held_out.any():
        return data, None
    return data.take(np.flatnonzero(~held_out)), data.take(np.flatnonzero(held_out))


def _hash(data: LabelledData, names: Sequence[str], row: int) -> int:
    """Hash of a row without its padding, so that it does not depend on how long other rows are."""
    length = int(data.lengths[row])
    content = hashlib.sha256()
    for name in names:
        array = data.feeds[name][row]
        content.update(np.ascontiguousarray(array[:length] if array.ndim else array).tobytes())
    return int.from_bytes(content.digest()[:8], "big")


def _read_arrays(path: Path, bundle: Bundle, longest: int, truncate: bool) -> LabelledData:
    if truncate:
        raise InputError(f"{path}: truncate applies to text only; cut the arrays yourself")
    file = read_array_file(path, bundle.manifest.inputs, MAX_BYTES, MAX_ROWS)
    lengths = _lengths(bundle, file.feeds, file.rows)
    if lengths.max() > longest:
        row = int(lengths.argmax())
        raise InputError(
            f"{path}: row {row} has {lengths[row]} steps, the largest bucket for such requests takes {longest}; "
            "shorten it, or compile with a larger one"
        )
    labels = None if file.labels is None else checked_labels(path, file.labels, file.rows, _classes(bundle))
    # Steps behind those pad every row.
    feeds = InputChecker(bundle.manifest.inputs).taken(file.feeds, np.arange(file.rows), longest)
    return LabelledData(feeds, lengths, labels, 0, file.sha256)


def _read_texts(path: Path, bundle: Bundle, longest: int, truncate: bool) -> LabelledData:
    manifest = bundle.manifest
    if manifest.text is None:
        raise InputError(f"{path}: bundle {bundle.path} has no tokenizer; pass arrays as .npz instead of text")
    raw = read_file(path, MAX_BYTES, InputError)
    texts, labels = _parse_texts(path, raw, _classes(bundle))
    encoder = TextEncoder(bundle.file(manifest.text.file), manifest.text, manifest.inputs)
    encoded = encoder.encode(texts, longest, truncate=True)
    if encoded.truncated and not truncate:
        raise InputError(
            f"{path}: line {encoded.truncated[0] + 1}: more than {longest} tokens, which the largest bucket for such "
            "requests takes; shorten it, pass `truncate=True`, or compile with a larger one"
        )
    lengths = _lengths(bundle, encoded.feeds, len(texts))
    known = None if labels is None else np.array(labels, np.int64)
    return LabelledData(encoded.feeds, lengths, known, len(encoded.truncated), hashlib.sha256(raw).hexdigest())


def _parse_texts(path: Path, raw: bytes, classes: int) -> tuple[list[str], list[int] | None]:
    texts: list[str] = []
    labels: list[int] = []
    try:
        lines = raw.decode("utf-8").removesuffix("\n").split("\n") if raw else []
    except UnicodeDecodeError as failure:
        raise InputError(f"{path}: line {raw[: failure.start].count(10) + 1}: not UTF-8") from failure
    check_rows(path, len(lines), MAX_ROWS)
    for number, line in enumerate(lines, 1):
        where = f"{path}: line {number}"
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InputError(f'{where}: expected a JSON object such as {{"text": "...", "label": 0}}')
        if unknown := row.keys() - {"text", "label"}:
            raise InputError(f"{where}: unknown key {min(unknown)[:80]!r}; expected 'text' and perhaps 'label'")
        if not isinstance(row.get("text"), str):
            raise InputError(f"{where}: expected a 'text', got {row.get('text')!r:.80}")
        require_characters(f"{where}: 'text'", row["text"])
        if "label" in row:
            label = row["label"]
            if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < classes:
                raise InputError(f"{where}: label {label!r:.80}: expected a whole number, 0..{classes - 1}")
            labels.append(label)
        texts.append(row["text"])
        if labels and len(labels) != len(texts):
            missing = number if "label" not in row else 1
            raise InputError(f"{path}: line {missing}: has no 'label', and other lines have; label all rows or none")
    return texts, labels or None


def _lengths(bundle: Bundle, feeds: Mapping[str, Array], rows: int) -> Array:
    """Steps that count, int64 ``[n]``: up to the last that the mask keeps where others may be cut, else all."""
    exits = bundle.manifest.exits
    assert exits is not None
    mask = feeds[exits.mask]
    if not exits.trims:
        return np.full(rows, mask.shape[1], np.int64)
    return np.where(mask, np.arange(1, mask.shape[1] + 1), 1).max(axis=1).astype(np.int64)


def _classes(bundle: Bundle) -> int:
    assert bundle.manifest.exits is not None
    return bundle.manifest.exits.classes
