"""The graph of an engine before a backend opens it: the listed bytes, with weights in the bundle's store alone.

Backends follow a graph to whatever file beside it an initializer names, hard links included, which no manifest lists.
"""

from __future__ import annotations

import hashlib

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.manifest import WEIGHTS_NAME
from ...bundle.open_bundle import Bundle
from ...bundle.regular_file import FETCH_AGAIN, identity_at, regular_file
from ...errors import BundleCorruptError
from .initializers import Initializer, external_initializers
from .weight_store import span_with, tensor_spans

# Nodes and names; beside them a graph holds the initializers that the manifest counts as the engine's own.
_MAX_NODES_BYTES = 16 * 2**20


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
    path = bundle.file(WEIGHTS_NAME)
    identity = identity_at(path)
    if identity is None:
        raise BundleCorruptError(f"{path}: missing; {FETCH_AGAIN}")
    spans = tensor_spans(path, identity)
    for one in initializers:
        span_with(one, spans, path, where)
