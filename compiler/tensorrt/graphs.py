"""Graphs of engines for TensorRT: what is asked of them before a device builds plans."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from ...bucket import MAX_TOKENS
from ...errors import BuildError
from .operators import unsupported
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
    model = onnx.ModelProto.FromString(graph)
    changed = float_sums(model) + whole_clips(model) > 0
    if capacity is not None:
        scatter_caches(where, model, capacity)
        changed = True
    require_supported(where, model, _OLDEST_WITH_CACHES if capacity is not None else None)
    return model.SerializeToString(deterministic=True) if changed else graph


def require_supported(where: str, graph: onnx.ModelProto, tensorrt: str | None = None) -> None:
    """Raises BuildError naming what TensorRT's parser would refuse in ``graph``; see ``unsupported``."""
    if problems := unsupported(graph, tensorrt):
        release = f"TensorRT {tensorrt}" if tensorrt else "TensorRT 10"
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise BuildError(f"{where}: {release} cannot build its graph: {'; '.join(problems[:3])}{more}")


def float_sums(model: onnx.ModelProto) -> int:
    """Puts every CumSum over a mask between casts to float32 and back, in place; returns how many.

    A sum of anything but a mask's zeros and ones, or of 2^24 elements and more, stays as it is: it may not be exact.
    """
    graph = model.graph
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {v.name: v.type.tensor_type for v in (*inferred.value_info, *inferred.input, *inferred.output)}
    makers = {name: node for node in graph.node for name in node.output}
    changed = 0
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if node.op_type != "CumSum" or not _counts(node.input[0], types, makers):
            continue
        source, result, kind = node.input[0], node.output[0], types[node.input[0]].elem_type
        before = helper.make_node("Cast", [source], [f"{result}.mask"], f"{node.name}.float", to=TensorProto.FLOAT)
        after = helper.make_node("Cast", [f"{result}.count"], [result], f"{node.name}.whole", to=kind)
        node.input[0], node.output[0] = before.output[0], after.input[0]
        graph.node.insert(index + 1, after)
        graph.node.insert(index, before)
        changed += 1
    return changed


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


def whole_clips(model: onnx.ModelProto) -> int:
    """Replaces every Clip whose bounds are whole numbers among the initializers, in place; returns how many."""
    graph = model.graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    changed = 0
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        bounds = [(node.input[at], kind) for at, kind in _BOUNDS if len(node.input) > at and node.input[at]]
        if node.op_type != "Clip" or not bounds or any(kinds.get(name) not in _INTEGER_TYPES for name, _ in bounds):
            continue
        del graph.node[index]
        result, source = node.output[0], node.input[0]
        for number, (bound, kind) in enumerate(bounds):
            output = result if number == len(bounds) - 1 else f"{result}.{kind}"
            graph.node.insert(index + number, helper.make_node(kind, [source, bound], [output], f"{node.name}.{kind}"))
            source = output
        changed += 1
    return changed
