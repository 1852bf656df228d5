"""A template in another precision than it was traced in: graph in, graph out, in milliseconds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ....exporters.source import ModelSource
from ....profiles.precision import Precision
from ..encodings import split_encoding
from ..template import Template
from .cpu_kernels import as_qgemm, dynamic, small_tables, weight_only
from .fp32_nodes import kept_products
from .half import half
from .quantize import quantized


def in_precision(
    template: Template, precision: Precision, backend: str, scales: Mapping[str, float], heads: Collection[str]
) -> Template:
    """``template``, whose graph is in fp32, in ``precision`` as ``backend`` runs it.

    ``scales`` are those of the inputs of products, by weight. What answers at the outputs ``heads`` stays in fp32, and
    so do the scores that decide routes.
    """
    if precision in ("fp16", "bf16"):
        converted = half(template.proto, template.tables, "fp16" if precision == "fp16" else "bf16", heads)
        return replace(template, proto=converted.proto, tables=converted.tables, precision=precision)
    kept = kept_products(template.proto, heads)
    match precision:
        case "int8":
            proto = quantized(template.proto, scales, kept)
            if backend != "tensorrt":
                proto = small_tables(as_qgemm(proto))
        case "int8-dynamic":
            proto = small_tables(dynamic(template.proto, kept))
        case _:
            proto = small_tables(weight_only(template.proto, kept))
    return replace(template, proto=proto, precision=precision)


def exit_heads(source: ModelSource, segment: int | None) -> frozenset[str]:
    """The outputs of a whole model, or of a segment, by which something is decided: classes and entropies."""
    exits = source.exits
    outputs = source.signature.outputs if segment is None or exits is None else exits.entry.segments[segment].outputs
    names = {spec.name for spec in outputs if spec.role == "classes"}
    if exits is not None:
        names |= {exits.entry.logits, exits.entry.entropy} & {spec.name for spec in outputs}
    return frozenset(names)


def wide_products(template: Template) -> tuple[str, ...]:
    """The weights whose products stay in float32 though the template's precision is another."""
    initializers = template.proto.graph.initializer
    matrices = {t.name for t in initializers if t.data_type == t.FLOAT and len(t.dims) >= 2}  # those in the file too
    held = matrices - template.tables.keys()
    read = (
        name for node in template.proto.graph.node if node.op_type in ("Gemm", "MatMul") for name in node.input[1:2]
    )
    return tuple(dict.fromkeys(name for name in read if name in held and split_encoding(name)[1] == ""))
