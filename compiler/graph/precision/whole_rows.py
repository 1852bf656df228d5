"""``[B, S, H]`` from product to product in a KV-cache engine, where every product takes that.

Linear layers of a template run on ``[B * S, H]``, as Gemm wants, behind a Flatten and before a Reshape. In a step of
one token each of those costs what a small operator does, and products of blocks, products of integers whose rows are
scaled at run time, and those of ONNX Runtime's own that read a weight turned need neither.

Templates keep no intermediate shapes, for they are the universal model's: what is known of shapes here follows from
operators alone.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..edit import Edit
from ..passes.operators import CACHED_ATTENTION, ELEMENTWISE, MICROSOFT, NORMS

_ANY_RANK = ELEMENTWISE | NORMS | {"MatMulNBits", "QuantizeLinear"}
_KEEP_ROWS = ELEMENTWISE | NORMS | {"MatMulNBits", CACHED_ATTENTION, "RotaryEmbedding"}
# Inputs of QGemm: activations, their scale and zero, weights, their scales and zeros.
_QGEMM_INPUTS = 6
# Dimensions of rows and tokens left whole.
_WHOLE = 3
# A dimension: a number, or that of an input by its name.
_Dim = int | str


def in_whole_rows(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto``, whose rows are flattened from product to product (``flatten_rows``), without Flatten and Reshape
    around its products; or as it is, where something wants ``[B * S, H]`` or rows may not come back as they went in."""
    if all(node.op_type != CACHED_ATTENTION for node in proto.graph.node):
        return proto
    targets = reshape_targets(proto)
    ranks = ranks_of(proto, targets)
    if not _come_back(proto, targets, ranks):
        return proto
    edit, whole, renamed = Edit(proto), dict[str, str](), dict[str, str]()
    for node in edit.source:
        flat = [name for name in node.input if name in whole]
        rank = ranks.get(node.input[0]) if node.input else None
        node.input[:] = [renamed.get(name, name) for name in node.input]
        if node.op_type == "Flatten" and not flat and _int(node, "axis", 1) == 2:
            edit.nodes.append(node)  # for angles
            if rank == _WHOLE:
                whole[node.output[0]] = node.input[0]
            elif rank is not None:  # heads apart
                together = edit.constant(np.array([0, 0, -1], np.int64))
                whole[node.output[0]] = edit.add("Reshape", [node.input[0], together])
        elif node.op_type == "QGemm" and flat and _is_plain(node):
            x, scale, zero, weight, scales, zeros = node.input[:_QGEMM_INPUTS]
            read = [whole[x], weight, scale, scales, zero, zeros]
            edit.add("MatMulIntegerToFloat", read, node.output, MICROSOFT)
            whole[node.output[0]] = node.output[0]
        elif node.op_type == "Gemm" and flat and _is_product(node):
            turned = {"transB": 1} if _int(node, "transB", 0) else {}
            kind, domain = ("FusedMatMul", MICROSOFT) if turned else ("MatMul", "")
            edit.add(kind, [whole[node.input[0]], node.input[1]], node.output, domain, **turned)
            whole[node.output[0]] = node.output[0]
        elif not flat:
            edit.nodes.append(node)
        elif node.op_type == "Reshape" and len(targets.get(node.input[1], ())) == 3:
            renamed[node.output[0]] = whole[node.input[0]]
        elif node.op_type == "Reshape" or node.op_type in _ANY_RANK or _along_width(node, targets):
            node.input[:] = [whole.get(name, name) for name in node.input]
            edit.nodes.append(node)
            whole |= {} if node.op_type == "Reshape" else {name: name for name in node.output}
        elif node.op_type == "RotaryEmbedding":  # takes its angles flat
            edit.nodes.append(node)
        else:
            return proto
    _name_outputs(edit, {value.name for value in proto.graph.output}, renamed)
    return edit.done()


def _is_plain(product: onnx.NodeProto) -> bool:
    """Whether a QGemm is an integer product and no more: weights as they are, no sum behind it, floats out of it."""
    return not _int(product, "transB", 0) and not any(product.input[_QGEMM_INPUTS:])


def _is_product(gemm: onnx.NodeProto) -> bool:
    """Whether a Gemm is a product and no more: nothing added, nothing scaled."""
    scaled = any(attribute.name in ("alpha", "beta") and attribute.f != 1 for attribute in gemm.attribute)
    return not scaled and not _int(gemm, "transA", 0) and not any(gemm.input[2:])


class _Flat:
    """Facts of the values that are made of flattened rows: their width, and which have their rows in common."""

    def __init__(self) -> None:
        self.group: dict[str, int] = {}
        self.width: dict[str, int | None] = {}
        self._shapes: dict[int, tuple[_Dim, ...]] = {}  # of a group: its rows and tokens

    def begin(self, name: str, group: int, shape: tuple[_Dim, ...]) -> None:
        """``name`` is flattened from rows and tokens of ``shape``."""
        self.add([name], group, None)
        self._shapes[group] = shape

    def add(self, names: Iterable[str], group: int, width: int | None) -> None:
        for name in names:
            self.group[name], self.width[name] = group, width

    def comes_back(self, name: str, target: tuple[_Dim, ...]) -> bool:
        """Whether ``target`` gives ``name`` back with the rows and tokens that all of its group had."""
        return self._shapes[self.group[name]] == target[:2] and target[2] in (-1, self.width[name])

    def join(self, names: Sequence[str]) -> bool:
        """Makes the groups of ``names`` one; whether they can be."""
        first, *others = dict.fromkeys(self.group[name] for name in names)
        for other in others:
            if self._shapes[other] != self._shapes[first]:
                return False
            self.group |= {name: first for name, group in self.group.items() if group == other}
        return True


def _come_back(proto: onnx.ModelProto, targets: Mapping[str, tuple[_Dim, ...]], ranks: Mapping[str, int]) -> bool:
    """Whether what is made of flattened rows is given back with the rows and tokens that it had, and meets nothing that
    has others."""
    weights = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
    rows = {value.name: _dims_of(value)[:2] for value in proto.graph.input}
    unknown: set[str] = set()  # flattened from so many dimensions, or rows
    known = _Flat()
    for number, node in enumerate(proto.graph.node):
        flat = [name for name in node.input if name in known.group]
        if node.op_type == "Flatten" and not flat and _int(node, "axis", 1) == 2:
            if node.input[0] in ranks and len(rows.get(node.input[0], ())) > 1:
                known.begin(node.output[0], number, rows[node.input[0]])
            else:
                unknown.add(node.output[0])
        elif node.op_type == "RotaryEmbedding":
            if node.input[0] in {*flat, *unknown}:  # angles alone are flat
                return False
        elif unknown.intersection(node.input):
            return False
        elif node.op_type == "Reshape":
            target = targets.get(node.input[1], ())
            if flat and len(target) == 3 and not known.comes_back(flat[0], target):
                return False
        elif flat:
            others = [name for name in node.input if name and name not in flat]
            is_vector = all(len(weights.get(name, ("unknown",) * 2)) < 2 for name in others)
            if not known.join(flat) or (node.op_type in ELEMENTWISE and not is_vector):
                return False
            group, parts = known.group[flat[0]], _parts(node, targets)
            for name, width in parts.items():
                known.add([name], group, width)
            if not parts:
                known.add(node.output, group, _width(node, weights) or known.width[flat[0]])
        if (found := rows_of(node, rows, targets)) is not None:
            rows |= dict.fromkeys(node.output, found)
    return True


def _along_width(node: onnx.NodeProto, targets: Mapping[str, tuple[_Dim, ...]]) -> bool:
    """Whether a node takes the last dimension apart, or the largest number of it."""
    is_largest = node.op_type == "ReduceMax" and len(node.input) == 2 and targets.get(node.input[1]) == (-1,)
    return bool(_parts(node, targets)) or (is_largest and _int(node, "keepdims", 1) == 1)


def _parts(node: onnx.NodeProto, targets: Mapping[str, tuple[_Dim, ...]]) -> dict[str, int]:
    """Outputs of a Split of the last dimension into constant widths, and those; nothing of another node."""
    is_split = node.op_type == "Split" and _int(node, "axis", 0) == -1 and len(node.input) == 2
    widths = [width for width in targets.get(node.input[1], ()) if isinstance(width, int)] if is_split else []
    return dict(zip(node.output, widths, strict=True)) if widths else {}


def _width(node: onnx.NodeProto, weights: Mapping[str, tuple[int, ...]]) -> int | None:
    """Numbers of a token behind a product or a norm."""
    if node.op_type == "ReduceMax":
        return 1
    if node.op_type == "MatMulNBits":
        return _int(node, "N", 0)
    if node.op_type == "QGemm":
        return weights[node.input[3]][1 - _int(node, "transB", 0)]
    if node.op_type == "Gemm":
        return weights[node.input[1]][1 - _int(node, "transB", 0)]
    return None


def _name_outputs(edit: Edit, outputs: set[str], renamed: dict[str, str]) -> None:
    """Gives what a Reshape made an output of the graph its name."""
    names = {renamed[name]: name for name in outputs if name in renamed}
    for node in edit.nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def reshape_targets(proto: onnx.ModelProto) -> dict[str, tuple[_Dim, ...]]:
    """The vectors that Reshapes take, where the graph says how many dimensions they give."""
    dims = {(value.name, axis): dim for value in proto.graph.input for axis, dim in enumerate(_dims_of(value))}
    ranks = {value.name: len(_dims_of(value)) for value in proto.graph.input}
    found: dict[str, tuple[_Dim, ...]] = {
        tensor.name: tuple(numpy_helper.to_array(tensor).tolist())
        for tensor in proto.graph.initializer
        if len(tensor.dims) == 1 and tensor.data_type == onnx.TensorProto.INT64 and not _is_external(tensor)
    }
    for node in proto.graph.node:
        if node.op_type == "Shape":
            read = node.input[0]
            start, end = _int(node, "start", 0), _int(node, "end", ranks.get(read, 0))
            if start < end:
                found[node.output[0]] = tuple(dims.get((read, axis), f"{read}[{axis}]") for axis in range(start, end))
        elif node.op_type == "Concat" and all(name in found for name in node.input):
            found[node.output[0]] = tuple(dim for name in node.input for dim in found[name])
    return found


def ranks_of(proto: onnx.ModelProto, targets: Mapping[str, tuple[_Dim, ...]]) -> dict[str, int]:
    """How many dimensions values have, where operators that lie around products say it."""
    found = {value.name: len(_dims_of(value)) for value in proto.graph.input}
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
        elif node.op_type == CACHED_ATTENTION:
            rank = _WHOLE
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
    node: onnx.NodeProto, rows: Mapping[str, tuple[_Dim, ...]], targets: Mapping[str, tuple[_Dim, ...]]
) -> tuple[_Dim, ...] | None:
    """The first two dimensions of what ``node`` returns, where its inputs say them."""
    if node.op_type == "Reshape":
        target = targets.get(node.input[1], ())
        return target[:2] if len(target) > 2 else None
    if node.op_type == "Gather":
        given, numbers = (rows.get(name, ()) for name in node.input)
        axis = _int(node, "axis", 0)
        if axis == 0:  # a token's row of a table
            return numbers if len(numbers) > 1 else None
        # some tokens of every row, by their numbers
        return (given[0], *numbers) if axis == 1 and len(given) > 1 and len(numbers) == 1 else None
    if node.op_type in _KEEP_ROWS:
        return next((rows[name] for name in node.input if len(rows.get(name, ())) > 1), None)
    return None


def _dims_of(value: onnx.ValueInfoProto) -> tuple[_Dim, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _int(node: onnx.NodeProto, name: str, default: int) -> int:
    found = [helper.get_attribute_value(attribute) for attribute in node.attribute if attribute.name == name]
    return int(found[0]) if found else default


def _is_external(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL
