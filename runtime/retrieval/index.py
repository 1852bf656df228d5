"""An index: the embeddings of a corpus by the universal model, and search in it with any submodel.

Its file is an NPZ archive of plain arrays, as docs/retrieval.md specifies it; nothing in it runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np

from ...argument_types import again, checked, option
from ...bundle.open_bundle import Bundle
from ...bundle.roles import embedding_output
from ...errors import InputError, SelectionError
from ...outside_file import versioned_json
from ...progress import Progress
from ...strict import structure, unstructure
from ...whole_file import write_whole
from ..dimensions import required
from ..engines.residency import Residency
from ..inputs import options
from ..inputs.arrays import Array
from ..inputs.files import read_npz
from ..inputs.text import require_characters
from ..load import RESIDENCY, opened
from ..model import ElasticModel
from ..request import Request
from ..rows import Corpus, rows_of
from .identity import (
    INDEX_SCHEMA_VERSION,
    BuiltBy,
    IndexIdentity,
    check_fits,
    configuration_of,
    covered,
    identity_problems,
    tokenizer_sha256,
    universal_of,
)
from .search import encode, nearest

# An index is held in memory whole.
MAX_BYTES = 4 * 2**30
_MAX_IDENTITY_BYTES = 2**20
# Error of the length of a row from rounding to float32.
_LENGTH_TOLERANCE = 1e-3
# Values whose lengths are taken at a time, in float64: 64 MB.
_VALUES_MEASURED_AT_ONCE = 2**23
_REMEDY = "build the index again"
K = option("Number of rows to find per query.", 10, min=1)
QUERY_MS = again(options.LATENCY_MS, help="Latency limit of the encoding of one query, in ms.")
INDEX_DIMENSIONS = again(
    options.DIMENSIONS, help="Numbers of an embedding that the index must have. Default: what it has."
)
EMBEDDING = option("Embedding to index, an output of the model. Default: the bundle's own.", metavar="NAME")


@dataclass(frozen=True, eq=False)
class Found:
    """Hits of a search, and which submodel encoded the queries, and why.

    ``ids`` ``[Q, k]`` int64 are row numbers of the corpus, the best first, ``scores`` ``[Q, k]`` float32 their cosines,
    ``entries`` the texts or ids of those rows, if the index has them. ``truncated`` counts queries that were cut;
    ``prompt`` stood before each, the model's default one too.
    ``encode_ms`` and ``search_ms`` are of all queries together.
    """

    ids: Array
    scores: Array
    entries: tuple[tuple[str, ...], ...] | None
    submodel: str
    reason: str
    engines: tuple[str, ...]
    truncated: int
    prompt: str
    encode_ms: float
    search_ms: float


@dataclass(frozen=True, eq=False)
class Index:
    """Embeddings ``[N, H]`` float32 of length 1, held in memory, with what they are tied to.

    ``entries`` are the corpus's texts, or ids that the caller gave to rows of arrays; ``labels`` ``[N]`` int64 their
    classes, if known. ``name`` is what messages call it.
    """

    identity: IndexIdentity
    embeddings: Array
    entries: tuple[str, ...] | None = None
    labels: Array | None = None
    name: str = "index"

    @classmethod
    @checked
    def build(
        cls,
        bundle: str | os.PathLike[str] | ElasticModel,
        corpus: Corpus,
        *,
        ids: Sequence[str] | None = None,
        labels: Array | Sequence[int] | None = None,
        embedding: str | None = EMBEDDING,
        dimensions: int | None = options.DIMENSIONS,
        truncate: bool = options.TRUNCATE,
        prompt: str | None = options.PROMPT,
        prompt_name: str | None = options.PROMPT_NAME,
        residency: Residency | Literal["auto"] = RESIDENCY,
        progress: Progress = options.PROGRESS,
    ) -> Index:
        """An index of ``corpus``, texts or arrays by input name with rows first, by the universal model of a bundle,
        given by its path or open; ``nestforge.index``.

        ``ids`` name the rows of arrays, texts are kept as they are; ``labels`` ``[N]`` are their classes. Queries may
        stand behind another prompt. Raises InputError for rows that do not fit, SelectionError where the bundle cannot
        build an index.
        """
        with opened(bundle, residency) as model:
            rows = rows_of(model, corpus, truncate=truncate, prompt=prompt, prompt_name=prompt_name)
            own = model.bundle
            spec = embedding_output(own.manifest, embedding)
            built_by = universal_of(own.manifest)
            width = int(spec.dims[1]) if dimensions is None else required(spec, dimensions, submodel=built_by)
            universal = built_by.id
            if ids is not None and rows.texts is not None:
                raise InputError("ids: texts are kept as they are; ids are for arrays")
            entries = rows.texts if ids is None else tuple(ids)
            count = len(rows.lengths)
            if entries is not None and len(entries) != count:
                raise InputError(f"ids: expected {count} texts, one a row, got {len(entries)}: {entries!r:.80}")
            classes = None if labels is None else checked_labels(labels, count)
            check_size(count, width, entries)
            encoded = encode(
                model, rows, spec, Request(submodel=universal), width, truncate=truncate, progress=progress
            )
            weights = own.manifest.weights_sha256
            assert weights is not None  # covered() found it equal to the receipts'
            identity = IndexIdentity(
                schema_version=INDEX_SCHEMA_VERSION,
                model=own.manifest.name,
                weights_sha256=weights,
                configuration=configuration_of(own.manifest),
                output=spec.name,
                width=width,
                similarity="cosine",
                normalisation="l2",
                ties="lowest row",
                submodel=universal,
                engines=tuple(BuiltBy(e.bucket, covered(own, e, spec.name)) for e in encoded.engines),
                rows=count,
                entries="none" if entries is None else "ids" if rows.texts is None else "texts",
                labelled=labels is not None,
                truncated=encoded.truncated,
                tokenizer_sha256=None if rows.texts is None else tokenizer_sha256(own),
                prompt=rows.prompt or None,
            )
            return cls(identity, encoded.vectors, entries, classes)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Index:
        """Reads an index of any origin; nothing in it is executed. Raises InputError for what is damaged."""
        path = Path(path)
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
        return cls(identity, embeddings, entries, labels, f"index {path}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the index, whole or not at all; a file of that name is replaced. Raises OutputError; InputError for
        a text that is not Unicode."""
        identity = json.dumps(unstructure(self.identity), sort_keys=True).encode()
        members: dict[str, Any] = {"identity": np.frombuffer(identity, np.uint8), "embeddings": self.embeddings}
        if self.entries is not None:
            raw = [_utf8(entry) for entry in self.entries]
            members["entries"] = np.frombuffer(b"".join(raw), np.uint8)
            members["entry_ends"] = np.cumsum([len(entry) for entry in raw], dtype=np.int64)
        if self.labels is not None:
            members["labels"] = self.labels
        write_whole(Path(path), lambda stream: np.savez(stream, **members), "the index")

    def check(self, bundle: Bundle, dimensions: int | None = None) -> None:
        """Raises InputError unless ``bundle`` may answer with this index, which has the ``dimensions`` requested, if
        any were; SelectionError where a receipt is missing."""
        check_fits(self.identity, bundle, self.name)
        if dimensions not in (None, self.identity.width):
            raise InputError(
                f"dimensions: {self.name} has {self.identity.width}, to which queries are cut, requested {dimensions}; "
                "build an index with those"
            )

    @checked
    def search(
        self,
        model: ElasticModel,
        queries: Corpus | str,
        *,
        k: int = K,
        budget: str | None = options.BUDGET,
        latency_ms: float | None = QUERY_MS,
        memory_mb: float | None = options.MEMORY_MB,
        submodel: str | None = options.SUBMODEL,
        deadline_ms: float | None = options.DEADLINE_MS,
        dimensions: int | None = INDEX_DIMENSIONS,
        truncate: bool = options.TRUNCATE,
        prompt: str | None = options.PROMPT,
        prompt_name: str | None = options.PROMPT_NAME,
    ) -> Found:
        """The ``k`` nearest rows of each query (all, if the corpus has fewer), by the submodel that the limits choose.

        The choice is made once, for one query as long as the longest. ``deadline_ms`` is for a single query, and counts
        what the model is answering for other threads. Without a limit the largest submodel answers. Raises InputError
        if the index does not fit the model's bundle or a query does not fit the model, SelectionError where no submodel
        satisfies the limits or the one chosen has no parity receipt.
        """
        self.check(model.bundle, dimensions)
        started = perf_counter()
        texts = [queries] if isinstance(queries, str) else queries
        rows = rows_of(model, texts, truncate=truncate, prompt=prompt, prompt_name=prompt_name)
        if deadline_ms is not None and len(rows.lengths) > 1:
            raise SelectionError(
                f"`deadline_ms` is for one query, got {len(rows.lengths)}; ask with `latency_ms` instead"
            )
        spec = embedding_output(model.bundle.manifest, self.identity.output)
        request = Request(budget, submodel, latency_ms, memory_mb, deadline_ms)
        reason = None
        if deadline_ms is None:
            longest = int(rows.lengths.max())
            if truncate and rows.texts is not None:
                longest = min(longest, model.longest_sequence(1, submodel))
            choice = model.choose(1, longest, **request._asdict())
            request, reason = Request(submodel=choice.engine.submodel), choice.reason
        encoded = encode(model, rows, spec, request, self.identity.width, truncate=truncate)
        answered = model.bundle.manifest.submodel(encoded.engines[0].submodel)
        required(spec, self.identity.width, submodel=answered)
        encoded_at = perf_counter()
        ids, scores = nearest(self.embeddings, encoded.vectors, k)
        entries = self.entries
        return Found(
            ids=ids,
            scores=scores,
            entries=None if entries is None else tuple(tuple(entries[i] for i in row) for row in ids.tolist()),
            submodel=encoded.engines[0].submodel,
            reason=reason or encoded.reason,
            engines=tuple(engine.id for engine in encoded.engines),
            truncated=encoded.truncated,
            prompt=rows.prompt or "",
            encode_ms=1e3 * (encoded_at - started),
            search_ms=1e3 * (perf_counter() - encoded_at),
        )

    def __repr__(self) -> str:
        rows, width = self.embeddings.shape
        return f"Index({self.name!r}: {rows} rows x {width} by {self.identity.submodel} of {self.identity.model})"


index = Index.build


def checked_labels(labels: Array | Sequence[int], rows: int) -> Array:
    """Labels as int64 ``[rows]``. Raises InputError unless they are whole numbers, one a row."""
    found = np.asarray(labels)
    if found.dtype.kind not in "iu" or found.shape != (rows,):
        raise InputError(f"labels: expected {rows} whole numbers, got {found.dtype} of shape {list(found.shape)}")
    return found.astype(np.int64)


def check_size(rows: int, width: int, entries: Sequence[str] | None) -> None:
    """Raises InputError for an index that would be too large or cannot be written, before any row is encoded."""
    size = rows * (4 * width + 16) + sum(len(_utf8(entry)) for entry in entries or ())
    if size + _MAX_IDENTITY_BYTES > MAX_BYTES:
        raise InputError(f"corpus: {rows} rows make an index of {size} bytes, more than {MAX_BYTES}; split the corpus")


def _identity(path: Path, raw: Array | None) -> IndexIdentity:
    if raw is None or raw.dtype != np.uint8 or raw.ndim != 1 or raw.size > _MAX_IDENTITY_BYTES:
        raise InputError(f"{path}: not an index of `nestforge index`; {_REMEDY}")
    data = versioned_json(raw.tobytes(), INDEX_SCHEMA_VERSION, f"{path}: identity", _REMEDY, InputError)
    identity = structure(IndexIdentity, data, f"{path}: identity", lambda problem: InputError(f"{problem}; {_REMEDY}"))
    for problem in identity_problems(identity):
        raise InputError(f"{path}: identity: {problem}; {_REMEDY}")
    return identity


def _of_length_one(rows: Array) -> Array:
    """Whether each row is; in float64, where no float32 overflows. A NaN is not."""
    with np.errstate(invalid="ignore"):
        wide = rows.astype(np.float64)
    return np.abs(np.sqrt((wide * wide).sum(axis=1)) - 1) < _LENGTH_TOLERANCE


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
    require_characters(f"text {text[:60]!r}", text)
    return text.encode()
