"""An engine between its emission and its proof."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from ...bundle.entries.engine_entry import EngineEntry
from ..graph.template import Template


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
