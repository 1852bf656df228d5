"""A small model's template in float32, as precisions are derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nestforge.bucket import Bucket
from nestforge.compiler.graph.make_template import traced_template
from nestforge.compiler.graph.template import Template
from nestforge.exporters.source import open_source
from nestforge.exporters.trace import Interface
from nestforge.exporters.universal import UniversalModel, load_universal


@dataclass(frozen=True)
class WideTemplate:
    """The template of ``model``, or of a segment of it; ``heads`` are the outputs that stay float32."""

    model: UniversalModel
    template: Template
    interface: Interface
    heads: frozenset[str]


def wide_template(checkpoint: Path, bucket: Bucket, segment: int | None = None) -> WideTemplate:
    """The model in folder ``checkpoint``, in the first of its variants."""
    model = load_universal(open_source(checkpoint))
    source, heads = model.source, frozenset[str]()
    module, interface = model.module, source.signature
    if segment is not None:
        assert source.exits is not None
        module, interface = source.exits.segment(module, segment), source.exits.entry.segments[segment]  # type: ignore[assignment]
        heads = frozenset({source.exits.entry.logits, source.exits.entry.entropy})
    offered = source.variants(model.spec.universal(), bucket)
    if source.architecture.lower is not None:
        first = {computed: next(iter(variants)) for computed, variants in offered.items()}
        module = source.architecture.lower(module, first)
    return WideTemplate(model, traced_template(model, module, interface, bucket, 20), interface, heads)
