"""Elastic dimensions operator by operator: its output's, of those of its inputs.

A dimension is a product of factors, slowest first: a number, an axis, or the name of a dimension that is free at run
time. A rule raises SliceError where an elastic one would not be followed rightly.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from ....elastic import Axis
from ....errors import SliceError
from .matching import Extent, constant, extents, factors, product
from .operators import CACHED_ATTENTION, ELEMENTWISE


@dataclass(frozen=True)
class Elastic:
    """A factor of a dimension that shrinks with ``axis``."""

    axis: Axis


Factor = Extent | Elastic
Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


def is_elastic(dim: Dim) -> bool:
    """Whether any of it shrinks."""
    return any(isinstance(factor, Elastic) for factor in dim)


def extent_of(dim: Iterable[Factor]) -> Extent:
    """Extent in the universal model."""
    return product([factor.axis.size if isinstance(factor, Elastic) else factor for factor in dim])


def slice_error(node: ir.Node, problem: str) -> SliceError:
    """That names the node."""
    return SliceError(f"node {node.outputs[0].name} ({node.op_type}): {problem}")


def _refuse_elastic(node: ir.Node, dims: Iterable[Dim], where: str = "of") -> None:
    if any(map(is_elastic, dims)):
        raise slice_error(node, f"{node.op_type} {where} an elastic dimension")


def _vector(node: ir.Node, index: int, size: int | None = None) -> list[int]:
    """The numbers in input ``index``: axes or extents."""
    found = constant(node, index)
    if found is None or size not in (None, found.size):
        raise slice_error(node, f"input {index} is not constant, or changes the number of dimensions")
    return [int(number) for number in found.flatten()]


def _elementwise(node: ir.Node, inputs: list[Dims]) -> Dims:
    rank = max(len(dims) for dims in inputs)
    padded = [((1,),) * (rank - len(dims)) + dims for dims in inputs]
    return tuple(_broadcast(node, dims) for dims in zip(*padded, strict=True))


def _broadcast(node: ir.Node, dims: Iterable[Dim]) -> Dim:
    wide = [dim for dim in dims if extent_of(dim) != 1 or is_elastic(dim)]
    if any(is_elastic(dim) for dim in wide) and len(set(wide)) > 1:
        raise slice_error(node, "an elastic dimension meets one that does not shrink with it")
    return wide[0] if wide else (1,)


def _gemm(node: ir.Node, inputs: list[Dims]) -> Dims:
    a, b = inputs[0], inputs[1]
    if node.attributes.get_int("transB", 0):
        b = (b[1], b[0])
    if node.attributes.get_int("transA", 0):
        a = (a[1], a[0])
    _contract(node, a[1], b[0])
    return _elementwise(node, [(a[0], b[1]), *inputs[2:]])


def _matmul(node: ir.Node, inputs: list[Dims]) -> Dims:
    a, b = inputs
    if len(a) < 2 or len(b) < 2:
        raise slice_error(node, "MatMul with a vector")
    _contract(node, a[-1], b[-2])
    return (*_elementwise(node, [a[:-2], b[:-2]]), a[-2], b[-1])


def _contract(node: ir.Node, left: Dim, right: Dim) -> None:
    if left != right and (is_elastic(left) or is_elastic(right)):
        raise slice_error(node, "the two sides of a product do not shrink together")


def _repeated(node: ir.Node, inputs: list[Dims]) -> Dims:
    """An Expand or a Tile along dimensions that do not shrink."""
    times = _vector(node, 1, len(inputs[0]))
    _refuse_elastic(node, (dim for dim, number in zip(inputs[0], times, strict=True) if number != 1))
    return inputs[0]


def _pad(node: ir.Node, inputs: list[Dims]) -> Dims:
    """Numbers put before or behind those of a dimension that does not shrink."""
    rank = len(inputs[0])
    added = _vector(node, 1, 2 * rank)
    _refuse_elastic(node, (dim for dim, *ends in zip(inputs[0], added[:rank], added[rank:], strict=True) if any(ends)))
    return inputs[0]


def _transpose(node: ir.Node, inputs: list[Dims]) -> Dims:
    permutation = node.attributes.get_ints("perm") or tuple(reversed(range(len(inputs[0]))))
    return tuple(inputs[0][index] for index in permutation)


def _last_axis_whole(node: ir.Node, inputs: list[Dims]) -> Dims:
    axis = node.attributes.get_int("axis", -1)
    _refuse_elastic(node, inputs[0][axis:] if node.op_type == "LayerNormalization" else [inputs[0][axis]], "over")
    return inputs[0]


def _split(node: ir.Node, inputs: list[Dims]) -> Dims:
    _refuse_elastic(node, [inputs[0][node.attributes.get_int("axis", 0)]])
    return inputs[0]


def _slice(node: ir.Node, inputs: list[Dims]) -> Dims:
    _refuse_elastic(node, (inputs[0][axis] for axis in _vector(node, 3)))
    return inputs[0]


def _gather(node: ir.Node, inputs: list[Dims]) -> Dims:
    """Steps looked up along a dimension that does not shrink, by indices that do not either."""
    data, indices = inputs
    axis = node.attributes.get_int("axis", 0) % len(data)
    _refuse_elastic(node, [data[axis], *indices], "from, or by,")
    return (*data[:axis], *indices, *data[axis + 1 :])


def _gather_nd(node: ir.Node, inputs: list[Dims]) -> Dims:
    """Looked up by the numbers of the last dimension of ``indices``, one for each of the first dimensions."""
    data, (*indices, numbers) = inputs
    count = extent_of(numbers)
    if node.attributes.get_int("batch_dims", 0) or not isinstance(count, int):
        raise slice_error(node, "GatherND by rows, or by how many numbers is not known")
    _refuse_elastic(node, [*data[:count], *indices], "from, or by,")
    return (*indices, *data[count:])


def _concat(node: ir.Node, inputs: list[Dims]) -> Dims:
    """Joined along a dimension that does not shrink; of the others, all inputs shrink alike."""
    axis = node.attributes.get_int("axis", 0) % len(inputs[0])
    for index, dims in enumerate(zip(*inputs, strict=True)):
        if index == axis or len(set(dims)) > 1:
            _refuse_elastic(node, dims)
    return inputs[0]


def _reduced(node: ir.Node, inputs: list[Dims]) -> Dims:
    """A mean or a maximum over an elastic dimension is that of the extent that it finds; a sum's divisor may be a
    constant."""
    reduced = {axis % len(inputs[0]) for axis in _vector(node, 1)}
    if node.attributes.get_int("keepdims", 1):
        return tuple((1,) if index in reduced else dim for index, dim in enumerate(inputs[0]))
    return tuple(dim for index, dim in enumerate(inputs[0]) if index not in reduced)


def _shape(node: ir.Node, inputs: list[Dims]) -> Dims:
    """Extents that do not shrink."""
    read = inputs[0][node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(inputs[0]))]
    _refuse_elastic(node, read)
    return ((len(read),),)


def _squeeze(node: ir.Node, inputs: list[Dims]) -> Dims:
    removed = {axis % len(inputs[0]) for axis in _vector(node, 1)}
    _refuse_elastic(node, (inputs[0][index] for index in removed))
    return tuple(dim for index, dim in enumerate(inputs[0]) if index not in removed)


def _unsqueeze(node: ir.Node, inputs: list[Dims]) -> Dims:
    axes, rest = _vector(node, 1), iter(inputs[0])
    rank = len(inputs[0]) + len(axes)
    added = {axis % rank for axis in axes}
    return tuple((1,) if index in added else next(rest) for index in range(rank))


def _reshape(node: ir.Node, inputs: list[Dims]) -> Dims:
    """Regroups the factors into the output's extents."""
    found = extents(node.outputs[0])
    if found is None:
        raise slice_error(node, "the target of a Reshape is not known")
    left: list[Factor] = [factor for dim in inputs[0] for factor in dim if factor != 1]
    return tuple(_take(node, left, extent) for extent in found)


def _take(node: ir.Node, left: list[Factor], extent: Extent) -> Dim:
    """Takes factors from the front whose product is ``extent``; a number may be split, an axis may not."""
    names = [factor for factor in factors(extent) if isinstance(factor, str)]
    needed = prod(factor for factor in factors(extent) if isinstance(factor, int))
    taken: list[Factor] = []
    while names or needed != 1:
        factor = left.pop(0) if left else 0
        if isinstance(factor, str):
            if factor not in names:
                raise slice_error(node, f"a Reshape that cuts through dimension {factor} at extent {extent}")
            names.remove(factor)
        else:
            size = factor.axis.size if isinstance(factor, Elastic) else factor
            if isinstance(factor, int) and size > needed > 1 and size % needed == 0:
                left.insert(0, size // needed)
                factor = size = needed
            if not size or needed % size:
                raise slice_error(node, f"a Reshape that cuts through an elastic dimension at extent {extent}")
            needed //= size
        taken.append(factor)
    return tuple(taken) or (1,)


def _attention(node: ir.Node, inputs: list[Dims]) -> Dims:
    """Output of rows of queries, which may shrink, over keys and values, which may not."""
    query, _, value = inputs[:3]
    if any(is_elastic(dim) for dims in (query[:1], query[2:], *inputs[1:]) for dim in dims):
        raise slice_error(node, "attention whose keys, or numbers of a key, shrink")
    return (*query[:2], value[2])


def _first_input(_: ir.Node, inputs: list[Dims]) -> Dims:
    """Output of an operator that leaves a tensor its shape: positions turned, or what queries read of a cache, whose
    own heads follow from the attributes (``head_axes``)."""
    return inputs[0]


DIMS_BY_OPERATOR: dict[str, Callable[[ir.Node, list[Dims]], Dims]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("Reshape", "Flatten"), _reshape),
    **dict.fromkeys(("Expand", "Tile"), _repeated),
    **dict.fromkeys(("Softmax", "LayerNormalization"), _last_axis_whole),
    **dict.fromkeys(("ReduceMax", "ReduceMean"), _reduced),
    **dict.fromkeys(("RotaryEmbedding", CACHED_ATTENTION), _first_input),
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Transpose": _transpose,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Concat": _concat,
    "Shape": _shape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Pad": _pad,
    "MultiHeadAttention": _attention,
}
