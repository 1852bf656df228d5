"""What a graph says of the shapes of its values: targets of Reshapes, numbers of dimensions, rows and tokens.

Intermediate shapes are not kept in templates, for they are the universal model's; these follow from operators alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper, numpy_helper

from ..passes.elementwise import ELEMENTWISE

NORMS = frozenset({"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"})
_KEEP_ROWS = ELEMENTWISE | NORMS | {"MatMulNBits", "GroupQueryAttention", "RotaryEmbedding"}
# Dimensions of rows and tokens left whole.
WHOLE = 3
# A dimension: a number, or that of an input by its name.
Dim = int | str


def reshape_targets(proto: onnx.ModelProto) -> dict[str, tuple[Dim, ...]]:
    """The vectors that Reshapes take, where the graph says how many dimensions they give."""
    dims = {(value.name, axis): dim for value in proto.graph.input for axis, dim in enumerate(dims_of(value))}
    ranks = {value.name: len(dims_of(value)) for value in proto.graph.input}
    found: dict[str, tuple[Dim, ...]] = {
        tensor.name: tuple(numpy_helper.to_array(tensor).tolist())
        for tensor in proto.graph.initializer
        if len(tensor.dims) == 1 and tensor.data_type == onnx.TensorProto.INT64 and not _is_external(tensor)
    }
    for node in proto.graph.node:
        if node.op_type == "Shape":
            read = node.input[0]
            start, end = int_attribute(node, "start", 0), int_attribute(node, "end", ranks.get(read, 0))
            if start < end:
                found[node.output[0]] = tuple(dims.get((read, axis), f"{read}[{axis}]") for axis in range(start, end))
        elif node.op_type == "Concat" and all(name in found for name in node.input):
            found[node.output[0]] = tuple(dim for name in node.input for dim in found[name])
    return found


def ranks_of(proto: onnx.ModelProto, targets: Mapping[str, tuple[Dim, ...]]) -> dict[str, int]:
    """How many dimensions values have, where operators that lie around products say it."""
    found = {value.name: len(dims_of(value)) for value in proto.graph.input}
    tensors = {tensor.name: len(tensor.dims) for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        rank: int | None = None
        if node.op_type == "Reshape":
            rank = len(targets.get(node.input[1], ())) or None
        elif node.op_type == "Transpose":
            rank = next((len(attribute.ints) for attribute in node.attribute if attribute.name == "perm"), None)
        elif node.op_type == "Gather" and node.input[1] in found:
            given_rank = found.get(node.input[0], tensors.get(node.input[0]))
            rank = None if given_rank is None else given_rank - 1 + found[node.input[1]]
        elif node.op_type == "GroupQueryAttention":
            rank = WHOLE
        elif node.op_type == "Unsqueeze" and node.input[0] in found and node.input[1] in targets:
            rank = found[node.input[0]] + len(targets[node.input[1]])
        elif node.op_type in ELEMENTWISE:
            given = [found.get(name, tensors.get(name)) for name in node.input if name]
            known = [one for one in given if one is not None]
            rank = max(known) if len(known) == len(given) else None
        elif node.op_type in _KEEP_ROWS:
            rank = found.get(node.input[0])
        if rank is not None:
            found |= dict.fromkeys(node.output, rank)
    return found


def rows_of(
    node: onnx.NodeProto, rows: Mapping[str, tuple[Dim, ...]], targets: Mapping[str, tuple[Dim, ...]]
) -> tuple[Dim, ...] | None:
    """The first two dimensions of what ``node`` returns, where its inputs say them."""
    if node.op_type == "Reshape":
        target = targets.get(node.input[1], ())
        return target[:2] if len(target) > 2 else None
    if node.op_type == "Gather":
        given, numbers = (rows.get(name, ()) for name in node.input)
        axis = int_attribute(node, "axis", 0)
        if axis == 0:  # a token's row of a table
            return numbers if len(numbers) > 1 else None
        # some tokens of every row, by their numbers
        return (given[0], *numbers) if axis == 1 and len(given) > 1 and len(numbers) == 1 else None
    if node.op_type in _KEEP_ROWS:
        return next((rows[name] for name in node.input if len(rows.get(name, ())) > 1), None)
    return None


def dims_of(value: onnx.ValueInfoProto) -> tuple[Dim, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def int_attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    found = [helper.get_attribute_value(attribute) for attribute in node.attribute if attribute.name == name]
    return int(found[0]) if found else default


def _is_external(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL
