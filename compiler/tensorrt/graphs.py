"""Graphs of engines for TensorRT: what is asked of them before a device builds plans."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from ...bucket import MAX_TOKENS
from ...errors import BuildError
from ..graph.edit import Edit
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
