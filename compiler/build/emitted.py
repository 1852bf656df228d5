"""An engine between its emission and its proof."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.bundle.manifest import EngineEntry
from ..graph.template import Template


@dataclass(frozen=True)
class Emitted:
    """An engine whose file is written and whose parity is not proven yet."""

    entry: EngineEntry
    template: Template
    graph_sha256: str
