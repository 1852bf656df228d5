"""Frees every Reshape from the universal model's widths, so that a submodel differs in initializer extents alone.

Elastic dimensions are followed from the weights through the graph. A dimension is a product of factors, slowest first:
a number, an axis, or the name of a dimension that is free at run time: the output of a query projection is
``(heads * 32)``, after the split ``heads, 32``. A Reshape regroups the factors, and its one elastic target dimension
becomes ``-1``.

Requires: extents that are numbers or names; linear layers as Gemm; prefix slices along dimension 0 of each stored
weight. Ensures: no constant in the graph repeats an elastic extent. Raises SliceError naming the first node it cannot
follow, and then leaves the graph as it was: every dimension is followed before the first Reshape changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from ....elastic import Axis
from ....errors import SliceError
from .elementwise import ELEMENTWISE
from .extents import Extent, extents, factors, product, reshape_target
from .matching import scalar


@dataclass(frozen=True)
class Elastic:
    """A factor of a dimension that shrinks with ``axis``."""

    axis: Axis


# Attention over a cache, whose further outputs are that cache.
CACHED_ATTENTION = "GroupQueryAttention"
Factor = Extent | Elastic
Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


def free_elastic_dims(model: ir.Model, seeds: Mapping[str, Dim]) -> bool:
    """Follows the elastic dimensions from ``seeds`` (initializer name to its dimension 0) and frees the Reshapes."""
    _, targets = followed(model, seeds)
    for node, target in targets.items():
        made = reshape_target(model.graph, target)
        node.prepend(made)
        node.replace_input_with(1, made[-1].outputs[0])
    return bool(targets)


def followed(
    model: ir.Model, seeds: Mapping[str, Dim]
) -> tuple[Mapping[ir.Value, Dims], Mapping[ir.Node, list[Extent]]]:
    """The dimensions of every value that has an elastic one, and the new target of every Reshape that such a dimension
    reaches; nothing is changed."""
    known: dict[ir.Value, Dims] = {}
    targets: dict[ir.Node, list[Extent]] = {}
    for name, first in seeds.items():
        if name in model.graph.initializers:
            value = model.graph.initializers[name]
            known[value] = (first, *_dims(value, {})[1:])
    for node in model.graph:
        if not any(value in known for value in node.inputs if value is not None):
            continue
        rule = _DIMS_BY_OPERATOR.get(node.op_type)
        if rule is None:
            raise _error(node, f"no rule for {node.op_type} on an elastic dimension")
        dims = rule(node, [_dims(value, known) for value in node.inputs])
        if node.op_type == "Reshape" and not _is_free(node, dims):
            targets[node] = _target(node, dims)
        if any(_is_elastic(dim) for dim in dims):
            for output in node.outputs if node.op_type != CACHED_ATTENTION else node.outputs[:1]:
                known[output] = _at_extents(output, dims)
                if output.is_graph_output():
                    raise _error(node, "an output of the model would shrink")
    return known, targets


def _at_extents(output: ir.Value, dims: Dims) -> Dims:
    """``dims`` with the output's own extents where they are not elastic: what a Split or a Slice changes."""
    known = extents(output)
    if known is None or len(known) != len(dims):
        return dims
    return tuple(dim if _is_elastic(dim) else factors(extent) for dim, extent in zip(dims, known, strict=True))


def _dims(value: ir.Value | None, known: Mapping[ir.Value, Dims]) -> Dims:
    if value is None:
        return ()
    if value in known:
        return known[value]
    if value.shape is None:
        raise SliceError(f"value {value.name}: its shape is unknown")
    named = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    # What nobody has named is one factor that nothing else has.
    return tuple(factors(f"{value.name}.{at}" if dim is None else dim) for at, dim in enumerate(named))


def _is_elastic(dim: Dim) -> bool:
    return any(isinstance(factor, Elastic) for factor in dim)


def _extent(dim: Iterable[Factor]) -> Extent:
    return product([factor.axis.size if isinstance(factor, Elastic) else factor for factor in dim])


def _elementwise(node: ir.Node, inputs: list[Dims]) -> Dims:
    rank = max(len(dims) for dims in inputs)
    padded = [((1,),) * (rank - len(dims)) + dims for dims in inputs]
    return tuple(_broadcast(node, dims) for dims in zip(*padded, strict=True))


def _broadcast(node: ir.Node, dims: Iterable[Dim]) -> Dim:
    wide = [dim for dim in dims if _extent(dim) != 1 or _is_elastic(dim)]
    if any(_is_elastic(dim) for dim in wide) and len(set(wide)) > 1:
        raise _error(node, "an elastic dimension meets one that does not shrink with it")
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
        raise _error(node, "MatMul with a vector")
    _contract(node, a[-1], b[-2])
    return (*_elementwise(node, [a[:-2], b[:-2]]), a[-2], b[-1])


def _contract(node: ir.Node, left: Dim, right: Dim) -> None:
    if left != right and (_is_elastic(left) or _is_elastic(right)):
        raise _error(node, "the two sides of a product do not shrink together")


def _transpose(node: ir.Node, inputs: list[Dims]) -> Dims:
    permutation = node.attributes.get_ints("perm") or tuple(reversed(range(len(inputs[0]))))
    return tuple(inputs[0][index] for index in permutation)


def _last_axis_whole(node: ir.Node, inputs: list[Dims]) -> Dims:
    axis = node.attributes.get_int("axis", -1)
    reduced = inputs[0][axis:] if node.op_type == "LayerNormalization" else (inputs[0][axis],)
    if any(_is_elastic(dim) for dim in reduced):
        raise _error(node, f"{node.op_type} over an elastic dimension")
    return inputs[0]


def _split(node: ir.Node, inputs: list[Dims]) -> Dims:
    if _is_elastic(inputs[0][node.attributes.get_int("axis", 0)]):
        raise _error(node, "a Split of an elastic dimension")
    return inputs[0]


def _slice(node: ir.Node, inputs: list[Dims]) -> Dims:
    tensor = ir.convenience.get_const_tensor(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else None
    if tensor is None:
        raise _error(node, "the axes of a Slice are not constant")
    if any(_is_elastic(inputs[0][int(axis)]) for axis in tensor.numpy()):
        raise _error(node, "a Slice of an elastic dimension")
    return inputs[0]


def _gather(node: ir.Node, inputs: list[Dims]) -> Dims:
    """Steps looked up along a dimension that does not shrink, by indices that do not either."""
    data, indices = inputs
    axis = node.attributes.get_int("axis", 0) % len(data)
    if _is_elastic(data[axis]) or any(_is_elastic(dim) for dim in indices):
        raise _error(node, "a Gather from, or by, an elastic dimension")
    return (*data[:axis], *indices, *data[axis + 1 :])


def _concat(node: ir.Node, inputs: list[Dims]) -> Dims:
    """Joined along a dimension that does not shrink; of the others, all inputs shrink alike."""
    axis = node.attributes.get_int("axis", 0) % len(inputs[0])
    for index, dims in enumerate(zip(*inputs, strict=True)):
        elastic = any(_is_elastic(dim) for dim in dims)
        if elastic and (index == axis or len(set(dims)) > 1):
            raise _error(node, "a Concat of dimensions that do not shrink together")
    return inputs[0]


def _reduced(node: ir.Node, inputs: list[Dims]) -> Dims:
    """A mean or a maximum over an elastic dimension is that of the extent that it finds; a sum's divisor may be a
    constant."""
    given = node.inputs[1] if len(node.inputs) > 1 else None
    axes = ir.convenience.get_const_tensor(given) if given is not None else None
    if axes is None:
        raise _error(node, f"the axes of a {node.op_type} are not constant")
    reduced = {int(axis) % len(inputs[0]) for axis in axes.numpy().tolist()}
    if node.attributes.get_int("keepdims", 1):
        return tuple((1,) if index in reduced else dim for index, dim in enumerate(inputs[0]))
    return tuple(dim for index, dim in enumerate(inputs[0]) if index not in reduced)


def _unsqueeze(node: ir.Node, inputs: list[Dims]) -> Dims:
    axes = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
    if axes is None:
        raise _error(node, "the axes of an Unsqueeze are not constant")
    rank = len(inputs[0]) + axes.size
    added, rest = {int(axis) % rank for axis in axes.numpy().flatten()}, iter(inputs[0])
    return tuple((1,) if index in added else next(rest) for index in range(rank))


def _reshape(node: ir.Node, inputs: list[Dims]) -> Dims:
    """Regroups the factors into the output's extents."""
    found = extents(node.outputs[0])
    if found is None:
        raise _error(node, "the target of a Reshape is not known")
    left: list[Factor] = [factor for dim in inputs[0] for factor in dim if factor != 1]
    return tuple(_take(node, left, extent) for extent in found)


def _target(node: ir.Node, dims: Dims) -> list[Extent]:
    """The target of a Reshape whose output has ``dims``, with -1 for the one elastic dimension."""
    elastic = [index for index, dim in enumerate(dims) if _is_elastic(dim)]
    if len(elastic) > 1:
        raise _error(node, "a Reshape target with two elastic dimensions")
    return [-1 if index in elastic else _extent(dim) for index, dim in enumerate(dims)]


def _is_free(node: ir.Node, dims: Dims) -> bool:
    """Whether the target of a Reshape is put together at run time with -1 for its one elastic dimension."""
    target = node.inputs[1].producer() if node.inputs[1] is not None else None
    elastic = [index for index, dim in enumerate(dims) if _is_elastic(dim)]
    if target is None or target.op_type != "Concat" or len(target.inputs) != len(dims) or len(elastic) != 1:
        return False
    return scalar(target.inputs[elastic[0]]) == -1


def _take(node: ir.Node, left: list[Factor], extent: Extent) -> Dim:
    """Takes factors from the front whose product is ``extent``; a number may be split, an axis may not."""
    names = [factor for factor in factors(extent) if isinstance(factor, str)]
    needed = prod(factor for factor in factors(extent) if isinstance(factor, int))
    taken: list[Factor] = []
    while names or needed != 1:
        factor = left.pop(0) if left else 0
        if isinstance(factor, str):
            if factor not in names:
                raise _error(node, f"a Reshape that cuts through dimension {factor} at extent {extent}")
            names.remove(factor)
        else:
            size = factor.axis.size if isinstance(factor, Elastic) else factor
            if isinstance(factor, int) and size > needed > 1 and size % needed == 0:
                left.insert(0, size // needed)
                factor = size = needed
            if not size or needed % size:
                raise _error(node, f"a Reshape that cuts through an elastic dimension at extent {extent}")
            needed //= size
        taken.append(factor)
    return tuple(taken) or (1,)


def _first_input(_: ir.Node, inputs: list[Dims]) -> Dims:
    """What an operator returns that leaves a tensor its shape: positions turned, or what queries read of a cache, whose
    own heads follow from the attributes (cached/head_axes.py)."""
    return inputs[0]


def _error(node: ir.Node, problem: str) -> SliceError:
    return SliceError(f"node {node.outputs[0].name} ({node.op_type}): {problem}")


_DIMS_BY_OPERATOR: dict[str, Callable[[ir.Node, list[Dims]], Dims]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Transpose": _transpose,
    "Softmax": _last_axis_whole,
    "LayerNormalization": _last_axis_whole,
    "ReduceMax": _reduced,
    "ReduceMean": _reduced,
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Concat": _concat,
    "Unsqueeze": _unsqueeze,
    "RotaryEmbedding": _first_input,
    CACHED_ATTENTION: _first_input,
}
