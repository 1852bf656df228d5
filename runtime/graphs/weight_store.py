"""The weight store of a bundle, and the graphs that read it: the listed bytes, with weights in the store alone.

Backends follow a graph to whatever file beside it an initializer names, hard links included, which no manifest lists.
"""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary, finalize

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.files import FETCH_AGAIN, FileIdentity, identity_at, regular_file, stream_sha256
from ...bundle.open_bundle import Bundle
from ...errors import BundleCorruptError
from ...outside_file import parse_json
from .initializers import Initializer, external_initializers, files_of

# Some 40,000 tensors; parsed, a header takes 15 times its bytes.
_MAX_HEADER_BYTES = 4 * 2**20
_LENGTH_BYTES = 8
# Nodes and names; beside them a graph holds the initializers that the manifest counts as the engine's own.
_MAX_NODES_BYTES = 16 * 2**20
_mapped: WeakValueDictionary[FileIdentity, MappedStore] = WeakValueDictionary()
_lock = threading.Lock()


def store_initializers(bundle: Bundle, engine: EngineEntry) -> tuple[Initializer, ...]:
    """The initializers of ``engine`` that lie in the weight store, each within one of its tensors.

    Raises BundleCorruptError where the graph is not the one that the manifest lists, or has data anywhere else.
    """
    path = bundle.file(engine.file)
    with regular_file(path) as (file, identity):
        allowed = engine.private_bytes + _MAX_NODES_BYTES
        if identity.size > allowed:
            raise BundleCorruptError(f"{path}: {identity.size} bytes, more than the {allowed} of such an engine")
        graph = file.read(identity.size)  # for a larger number, memory for all of it would be taken
    expected = bundle.sha256(engine.file)
    if expected is not None and engine.file not in bundle.hashed:  # an engine that is being built has no entry yet
        digest = hashlib.sha256(graph).hexdigest()
        if digest != expected:
            raise BundleCorruptError(f"{path}: sha256 {digest}, expected {expected}; {FETCH_AGAIN}")
        bundle.hashed.add(engine.file)
    initializers = external_initializers(graph, str(path))
    if initializers:
        _require_tensors(bundle, initializers, str(path))
    return initializers


def _require_tensors(bundle: Bundle, initializers: tuple[Initializer, ...], where: str) -> None:
    for file in files_of(initializers):
        if file not in bundle.manifest.weight_names:
            raise BundleCorruptError(f"{where}: reads {file}, which the bundle does not list; {FETCH_AGAIN}")
        path = bundle.file(file)
        identity = identity_at(path)
        if identity is None:
            raise BundleCorruptError(f"{path}: missing; {FETCH_AGAIN}")
        spans = tensor_spans(path, identity)
        for one in initializers:
            if one.file == file:
                span_with(one, spans, path, where)


@lru_cache(maxsize=32)
def tensor_spans(path: Path, identity: FileIdentity) -> tuple[tuple[int, int], ...]:
    """First and last byte, exclusive, of each tensor of the safetensors file ``path``, in order.

    ``identity`` is the file's, so that one that changed is read again. Raises BundleCorruptError.
    """
    with readable(path), path.open("rb") as file:
        data, header = read_header(file, identity.size, path)
        spans = []
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                if not 0 <= begin <= end <= identity.size - data:
                    raise ValueError(f"{name}: outside the file")
                spans.append((data + begin, data + end))
    return tuple(sorted(spans))


def read_header(file: BinaryIO, size: int, path: Path) -> tuple[int, Any]:
    """Where the data of a safetensors file begin, and its header; it has ``size`` bytes in all.

    Raises BundleCorruptError for a header larger than any store's, ValueError for one that is none.
    """
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > size - _LENGTH_BYTES:
        raise ValueError("longer than the file")
    if length > _MAX_HEADER_BYTES:
        raise BundleCorruptError(f"{path}: a header of {length} bytes, more than the {_MAX_HEADER_BYTES} allowed")
    return _LENGTH_BYTES + length, parse_json(file.read(length))


def span_with(one: Initializer, spans: Sequence[tuple[int, int]], store: Path, where: str) -> tuple[int, int]:
    """The tensor of ``store``, one of its ``spans``, that holds the initializer of the graph ``where``.

    Raises BundleCorruptError where none does.
    """
    number = bisect_right(spans, one.offset, key=itemgetter(0)) - 1
    if number < 0 or one.offset + one.bytes > spans[number][1]:
        raise BundleCorruptError(
            f"{where}: initializer {one.name!r:.80}: bytes {one.offset} to {one.offset + one.bytes} are no tensor of "
            f"{store.name}; {FETCH_AGAIN}"
        )
    return spans[number]


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns a read that fails in the block into a damaged store. Raises BundleCorruptError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
        raise BundleCorruptError(f"{path}: cannot be read as a weight store; {FETCH_AGAIN}") from failure


class MappedStore:
    """A file of a store whose bytes open engines map: one that was written to would change their answers, and where one
    was cut short a run would end the process (SIGBUS). Replacing it by another changes nothing: this one stays."""

    def __init__(self, path: Path, sha256: str | None) -> None:
        self._path, self._sha256 = path, sha256
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        # With the last engine that maps it. In __del__, which runs while weak references still find the object, another
        # engine could take it over with its descriptor closed.
        finalize(self, os.close, self._descriptor).atexit = False
        self.identity = FileIdentity.of(os.fstat(self._descriptor))

    def require_unchanged(self) -> None:
        """Raises BundleCorruptError for a store that was written to since it was opened.

        Takes a microsecond; where its rights, owner or links changed (its removal is one) it is hashed, once.
        """
        if FileIdentity.of(os.fstat(self._descriptor)) == self.identity:
            return
        with self._lock:
            now = FileIdentity.of(os.fstat(self._descriptor))
            if now != self.identity and not (now.may_have_bytes_of(self.identity) and self._digest() == self._sha256):
                raise BundleCorruptError(
                    f"{self._path}: written to or cut short while engines read it; put a new bundle into a new folder, "
                    "and open it again"
                )
            self.identity = now

    def _digest(self) -> str:
        with readable(self._path), open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            return stream_sha256(file)


def mapped_store(path: Path, sha256: str | None) -> MappedStore:
    """The file of a store at ``path``, which all engines of the process share; its bundle lists ``sha256``.

    Raises BundleCorruptError.
    """
    with readable(path), _lock:
        opened = MappedStore(path, sha256)
        return _mapped.setdefault(opened.identity, opened)
