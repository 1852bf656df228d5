"""A template in another precision than it was traced in: graph in, graph out, in milliseconds."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import onnx

from ....exporters.source import ModelSource
from ....profiles.backends import BACKENDS
from ....profiles.precision import INT4, INT4_G128, TRACED, Encoding, Precision
from ..encodings import split_encoding
from ..template import Template
from .fp32_nodes import fp32_products
from .half import half, with_half_weights
from .quantize import dynamic, quantized, small_tables, static, weight_only
from .whole_rows import in_whole_rows

_PRODUCTS = ("Gemm", "MatMul", "FusedMatMul")
# A graph, and its large constants by name.
_Derived = tuple[onnx.ModelProto, Mapping[str, np.ndarray]]


def in_precision(
    template: Template,
    precision: Precision,
    backend: str,
    scales: Mapping[str, float],
    heads: Collection[str],
    outermost: Collection[str] = (),
) -> Template:
    """``template``, whose graph is in fp32, in ``precision`` as ``backend`` runs it.

    ``scales`` are those of the inputs of products, by weight. Nodes that answer at the outputs ``heads`` stay in fp32,
    and so do the scores that decide routes. The weights ``outermost`` have 8 bits where others have 4.
    """
    proto, tables = _TRANSFORMS[precision](_Traced(template, backend, scales, heads, outermost))
    return replace(template, proto=proto, tables=tables, precision=precision)


def as_run(template: Template, backend: str) -> Template:
    """``template`` as its engines run it: what others are derived from has the canonical form of its products."""
    if template.precision != TRACED or not BACKENDS[backend].own_operators:
        return template
    return replace(template, proto=in_whole_rows(template.proto))


def exit_heads(source: ModelSource, part: str | None) -> frozenset[str]:
    """The outputs of a whole model, or of a part, by which something is decided: classes and entropies."""
    exits = source.exits
    outputs = source.signature.outputs if part is None else source.parts[part].outputs
    names = {spec.name for spec in outputs if spec.role == "classes"}
    if exits is not None:
        names |= {exits.entry.logits, exits.entry.entropy} & {spec.name for spec in outputs}
    return frozenset(names)


def wide_products(template: Template) -> tuple[str, ...]:
    """The weights whose products stay in float32 though the template's precision is another."""
    initializers = template.proto.graph.initializer
    matrices = {t.name for t in initializers if t.data_type == t.FLOAT and len(t.dims) >= 2}  # those in the file too
    held = matrices - template.tables.keys()
    products = (node for node in template.proto.graph.node if node.op_type in _PRODUCTS)
    read = (name for node in products for name in node.input[1:2])
    return tuple(dict.fromkeys(name for name in read if name in held and split_encoding(name)[1] == ""))


def products_in_8_bits(template: Template) -> tuple[str, ...]:
    """The weights whose products have 8 bits, of a template whose others have 4."""
    read = (node.input[3] for node in template.proto.graph.node if node.op_type == "QGemm")
    return tuple(dict.fromkeys(split_encoding(name)[0] for name in read))


@dataclass(frozen=True)
class _Traced:
    """A traced template, and what ``in_precision`` is given with it."""

    template: Template
    backend: str
    scales: Mapping[str, float]
    heads: Collection[str]
    outermost: Collection[str]

    @property
    def in_fp32(self) -> frozenset[str]:
        """The products that stay in fp32."""
        return fp32_products(self.template.proto, self.heads)


def _half(precision: Literal["fp16", "bf16"], traced: _Traced) -> _Derived:
    return half(traced.template.proto, traced.template.tables, precision, traced.heads)


def _int8(traced: _Traced) -> _Derived:
    given = traced.template.proto, traced.scales, traced.in_fp32
    own = BACKENDS[traced.backend].own_operators
    return small_tables(static(*given)) if own else quantized(*given), traced.template.tables


def _int8_dynamic(traced: _Traced) -> _Derived:
    return small_tables(dynamic(traced.template.proto, traced.in_fp32)), traced.template.tables


def _four_bits(encoding: Encoding, traced: _Traced) -> _Derived:
    proto = weight_only(traced.template.proto, traced.in_fp32, traced.outermost, encoding)
    return in_whole_rows(small_tables(proto)), traced.template.tables


def _half_weights(narrow: Literal["fp16", "bf16"], traced: _Traced) -> _Derived:
    template = as_run(traced.template, traced.backend)
    read = {node.output[0]: node.input[1:2] for node in traced.template.proto.graph.node}
    whole = {weight for value in traced.in_fp32 for weight in read[value]} | template.tables.keys()
    return with_half_weights(template.proto, narrow, whole), template.tables


# How a traced graph gets each precision of the registry.
_TRANSFORMS: Mapping[Precision, Callable[[_Traced], _Derived]] = {
    "fp32": lambda traced: (traced.template.proto, traced.template.tables),
    "fp16-weights": partial(_half_weights, "fp16"),
    "fp16": partial(_half, "fp16"),
    "bf16-weights": partial(_half_weights, "bf16"),
    "bf16": partial(_half, "bf16"),
    "int8": _int8,
    "int8-dynamic": _int8_dynamic,
    "int4": partial(_four_bits, INT4),
    "int4-g128": partial(_four_bits, INT4_G128),
}
