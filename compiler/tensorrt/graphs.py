"""Graphs of engines for TensorRT: what is asked of them before a device builds plans.

``operators.json`` holds the support table of TensorRT's ONNX parser as its documentation states it, with source and
version: its own refusals name no remedy, so an operator that it lacks is refused here. A table holds from its release
on until the next one; before the oldest, and where no release is named, the oldest is asked, whose answer holds for all
later ones."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ...bucket import MAX_TOKENS
from ...errors import BuildError
from ..graph.edit import Edit
from .scatter_caches import scatter_caches

# The release whose parser takes scatters into a cache, and attention.
_OLDEST_WITH_CACHES = "10.15"
# Whole numbers up to here are exact in float32.
_EXACT_IN_FLOAT32 = 2**24
# As buckets name them, whose product is at most MAX_TOKENS.
_FREE_DIMENSIONS = ("batch", "sequence")
_INTEGER_TYPES = (TensorProto.INT32, TensorProto.INT64)
# Inputs of the operator behind what it clips, and what does the same by each.
_BOUNDS = ((1, "Max"), (2, "Min"))
_Types = Mapping[str, onnx.TypeProto.Tensor]


def accepted(where: str, graph: bytes, capacity: int | None = None) -> bytes:
    """``graph`` as every release of TensorRT from 10.3 on takes it: an equal function, in operators that it has. One
    that keeps a cache, of ``capacity`` tokens, is for releases from 10.15 on.

    Raises BuildError; see ``require_supported``.
    """
    given = onnx.ModelProto.FromString(graph)
    model = in_parsed_operators(given)
    if capacity is not None:
        model = scatter_caches(where, model, capacity)
    require_supported(where, model, _OLDEST_WITH_CACHES if capacity is not None else None)
    return graph if model is given else model.SerializeToString(deterministic=True)


def require_supported(where: str, graph: onnx.ModelProto, tensorrt: str | None = None) -> None:
    """Raises BuildError naming what TensorRT's parser would refuse in ``graph``; see ``unsupported``."""
    if problems := unsupported(graph, tensorrt):
        release = f"TensorRT {tensorrt}" if tensorrt else "TensorRT 10"
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise BuildError(f"{where}: {release} cannot build its graph: {'; '.join(problems[:3])}{more}")


def in_parsed_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` with every CumSum over a mask between casts to float32 and back, and every Clip whose bounds are whole
    numbers among the initializers as Max and Min; itself where it has neither.

    A sum of anything but a mask's zeros and ones, or of 2^24 elements and more, stays as it is: it may not be exact.
    """
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {v.name: v.type.tensor_type for v in (*inferred.value_info, *inferred.input, *inferred.output)}
    makers = {name: node for node in model.graph.node for name in node.output}
    edit, changed = Edit(model), False
    kinds = {name: tensor.data_type for name, tensor in edit.initializers.items()}
    for node in edit.source:
        bounds = [(node.input[at], kind) for at, kind in _BOUNDS if len(node.input) > at and node.input[at]]
        if node.op_type == "CumSum" and _counts(node.input[0], types, makers):
            result, kind = node.output[0], types[node.input[0]].elem_type
            mask, name = [f"{result}.mask"], f"{node.name}.float"
            node.input[0] = edit.add("Cast", [node.input[0]], mask, name=name, to=TensorProto.FLOAT)
            node.output[0] = f"{result}.count"
            edit.nodes.append(node)
            edit.add("Cast", [node.output[0]], [result], name=f"{node.name}.whole", to=kind)
        elif node.op_type == "Clip" and bounds and all(kinds.get(name) in _INTEGER_TYPES for name, _ in bounds):
            value, result = node.input[0], node.output[0]
            for number, (bound, operator) in enumerate(bounds, 1):
                output = result if number == len(bounds) else f"{result}.{operator}"
                value = edit.add(operator, [value, bound], [output], name=f"{node.name}.{operator}")
        else:
            edit.nodes.append(node)
            continue
        changed = True
    return edit.done() if changed else model


def _counts(name: str, types: _Types, makers: Mapping[str, onnx.NodeProto]) -> bool:
    """Whether ``name`` holds whole numbers that are 0 or 1, fewer than 2^24 of them."""
    tensor = types.get(name)
    if tensor is None or tensor.elem_type not in _INTEGER_TYPES:
        return False
    sizes = [MAX_TOKENS if dim.dim_param in _FREE_DIMENSIONS else dim.dim_value for dim in tensor.shape.dim]
    if not all(sizes) or max(sizes, default=0) >= _EXACT_IN_FLOAT32:
        return False
    while types[name].elem_type != TensorProto.BOOL:
        maker = makers.get(name)
        if maker is None or maker.op_type != "Cast" or maker.input[0] not in types:
            return False
        name = maker.input[0]
    return True


_DOMAINS = ("", "ai.onnx")
# Names that the table uses.
_TYPE_NAMES = {
    "FLOAT": "FP32",
    "FLOAT16": "FP16",
    "BFLOAT16": "BF16",
    "FLOAT8E4M3FN": "FP8",
    "FLOAT4E2M1": "FP4",
    "DOUBLE": "FP64",
}
# The type that the table means is that of the first output here, of the first input elsewhere.
_TYPED_BY_OUTPUT = frozenset({"Constant", "ConstantOfShape", "EyeLike", "Range", "Where"})
_MAX_TOP_K = 3840
# Outputs whose shape follows from values: no static memory, and no CUDA graph.
_DYNAMIC_SHAPE_OPERATORS = frozenset({"NonMaxSuppression", "NonZero"})
# Inputs that must be constants, by position.
_CONSTANT_INPUTS = {"CumSum": 1, "OneHot": 1, "Slice": 3, "Squeeze": 1, "TopK": 1, "Unsqueeze": 1}


@dataclass(frozen=True)
class OperatorTable:
    """Operators of the parser of TensorRT ``release``: types by operator, and the first and last opset."""

    release: tuple[int, ...]
    opsets: tuple[int, int]
    types: Mapping[str, frozenset[str]]


@cache
def operator_tables() -> tuple[OperatorTable, ...]:
    """The tables of ``operators.json``, oldest first, each with all that those before it have."""
    data = json.loads(resources.files(__package__).joinpath("operators.json").read_text())
    tables: list[OperatorTable] = []
    types: dict[str, frozenset[str]] = {}
    for entry in data["tables"]:
        types = types | {name: frozenset(key.split()) for key, names in entry["types"].items() for name in names}
        low, high = entry["opsets"]
        tables.append(OperatorTable(_numbers(entry["tensorrt"]), (low, high), types))
    return tuple(tables)


def unsupported(model: onnx.ModelProto, tensorrt: str | None = None) -> list[str]:
    """Why TensorRT's parser would refuse ``model``, or could not run it in static memory; empty if it would not.

    ``tensorrt`` is the release that builds, such as ``10.3.0``; None asks for what every release from 10.0 on takes.
    Each line names the operator, the first node that it concerns, and what is expected.
    """
    tables = operator_tables()
    release = _numbers(tensorrt) if tensorrt else tables[0].release
    table = next((table for table in reversed(tables) if table.release <= release), tables[0])
    problems: dict[str, None] = {}  # keeps their order, and each once
    versions = {entry.domain: entry.version for entry in model.opset_import if entry.domain in _DOMAINS}
    low, high = table.opsets
    for version in versions.values():
        if not low <= version <= high:
            problems[f"opset {version}: expected {low} to {high}"] = None
    graph = onnx.shape_inference.infer_shapes(model).graph
    seen: set[tuple[str, str]] = set()
    for node, values in _nodes(graph, _Values({}, {})):
        for problem in _problems(node, values, table):
            if (node.op_type, problem) not in seen:
                seen.add((node.op_type, problem))
                problems[f"{node.op_type} (node {node.name or node.output[0]!r}): {problem}"] = None
    return list(problems)


@dataclass(frozen=True)
class _Values:
    """Facts in a graph, outer graphs included: element types and constants by name."""

    types: Mapping[str, str]
    constants: Mapping[str, onnx.TensorProto]


def _nodes(graph: onnx.GraphProto, outer: _Values) -> Iterator[tuple[onnx.NodeProto, _Values]]:
    types, constants = dict(outer.types), dict(outer.constants)
    for tensor in graph.initializer:
        constants[tensor.name] = tensor
        types[tensor.name] = _type_name(tensor.data_type)
    for value in (*graph.input, *graph.value_info, *graph.output):
        types[value.name] = _type_name(value.type.tensor_type.elem_type)
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    values = _Values(types, constants)
    for node in graph.node:
        yield node, values
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g, values)


def _problems(node: onnx.NodeProto, values: _Values, table: OperatorTable) -> Iterator[str]:
    if node.domain not in _DOMAINS:
        yield f"belongs to {node.domain}, and the parser knows standard operators alone"
        return
    if node.op_type not in table.types:
        later = [other for other in operator_tables() if node.op_type in other.types]
        since = f"; TensorRT {'.'.join(map(str, later[0].release))} and later have it" if later else ""
        yield f"the parser has no such operator{since}"
        return
    taken = table.types[node.op_type]
    for name in _typed(node):
        found = values.types.get(name)
        if found and found not in taken:
            yield f"{found}; expected one of {', '.join(sorted(taken))}"
    constant = _CONSTANT_INPUTS.get(node.op_type, 1 if node.op_type.startswith("Reduce") else None)
    if constant is not None and constant < len(node.input):
        name = node.input[constant]
        if name and name not in values.constants:
            yield f"input {constant} is computed; expected a constant"
    rule = _RULES.get(node.op_type)
    if rule is not None:
        yield from rule(node, values)
    if node.op_type in _DYNAMIC_SHAPE_OPERATORS:
        yield "its output's shape follows from values, so no static engine can hold it"


def _typed(node: onnx.NodeProto) -> Iterable[str]:
    if node.op_type == "Cast":
        return node.input[0], node.output[0]
    if node.op_type in _TYPED_BY_OUTPUT or not node.input:
        return list(node.output[:1])
    return list(node.input[:1])


def _scatter_nd(node: onnx.NodeProto, _values: _Values) -> Iterator[str]:
    reduction = _attribute(node, "reduction", b"none").decode()
    if reduction != "none":
        yield f"reduction {reduction!r}; expected none"


def _topk(node: onnx.NodeProto, values: _Values) -> Iterator[str]:
    if _attribute(node, "sorted", 1) != 1:
        yield "sorted 0; expected 1"
    count = values.constants.get(node.input[1]) if len(node.input) > 1 else None
    if count is not None and (k := int(_array(count).reshape(-1)[0])) >= _MAX_TOP_K:
        yield f"k {k}; expected fewer than {_MAX_TOP_K}"


def _layer_norm(node: onnx.NodeProto, _values: _Values) -> Iterator[str]:
    if any(node.output[1:]):
        yield "returns mean or deviation; expected the first output alone"


def _quantize(node: onnx.NodeProto, values: _Values) -> Iterator[str]:
    zero = values.constants.get(node.input[2]) if len(node.input) > 2 else None
    if zero is not None and zero.data_location != onnx.TensorProto.EXTERNAL and _array(zero).any():
        yield "a zero point other than 0"


def _tensor_scatter(node: onnx.NodeProto, _values: _Values) -> Iterator[str]:
    mode = _attribute(node, "mode", b"linear").decode()
    if mode != "linear":
        yield f"mode {mode!r}; expected linear"


_Rule = Callable[[onnx.NodeProto, _Values], Iterator[str]]
_RULES: Mapping[str, _Rule] = {
    "DequantizeLinear": _quantize,
    "LayerNormalization": _layer_norm,
    "QuantizeLinear": _quantize,
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
    "TopK": _topk,
}


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def _array(tensor: onnx.TensorProto) -> np.ndarray:
    return np.asarray(numpy_helper.to_array(tensor))


def _type_name(elem_type: int) -> str:
    """The table's name, or nothing where the type is not known."""
    name = onnx.TensorProto.DataType.Name(elem_type)
    return "" if name == "UNDEFINED" else _TYPE_NAMES.get(name, name)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
