"""An engine between its emission and its proof, and what engines and their files are called."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry
from ...elastic import Submodel
from ..graph.template import Template

_MAX_STEM_LENGTH = 120


@dataclass(frozen=True)
class Emitted:
    """An engine whose file is written and whose parity is not proven yet: its ``graph``, and the ``proof_graph`` that
    this host runs to prove it."""

    entry: EngineEntry
    template: Template
    graph: bytes
    proof_graph: bytes

    @cached_property
    def graph_sha256(self) -> str:
        return hashlib.sha256(self.graph).hexdigest()


def engine_names(submodel: Submodel, parts: tuple[str, ...], bucket: Bucket) -> tuple[str, str]:
    """Id of the engine of ``submodel`` at ``bucket``, and what its files are called but for their ends; ``parts`` tell
    it from others of that submodel and bucket."""
    return (
        f"{'.'.join((submodel.id, *parts))}@{bucket.label}",
        f"{'.'.join((short(submodel.id), *parts))}.{bucket.label}",
    )


def short(submodel_id: str) -> str:
    """The id as part of a file name: ids with many different widths would not fit one."""
    if len(submodel_id) <= _MAX_STEM_LENGTH:
        return submodel_id
    return f"{submodel_id[:_MAX_STEM_LENGTH]}-{hashlib.sha256(submodel_id.encode()).hexdigest()[:8]}"
