"""Frees every Reshape from the universal model's widths, so that a submodel differs in initializer extents alone.

Elastic dimensions are followed from the weights through the graph. A dimension is a product of factors, slowest first:
a number, an axis, or the name of a dimension that is free at run time: the output of a query projection is
``(heads * 32)``, after the split ``heads, 32``. A Reshape regroups the factors, and its one elastic target dimension
becomes ``-1``.

Two things of a submodel do not follow from the extents of its weights, and are set when it is emitted: the graph's own
inputs and outputs, and the heads of attention over a cache, which are attributes of its operator.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import onnx_ir as ir

from ....elastic import Axis
from ....errors import SliceError
from .dims_by_operator import DIMS_BY_OPERATOR, Dim, Dims, Elastic, extent_of, is_elastic, slice_error
from .matching import Extent, extents, factors, int64_constant, reshape_target, scalar, typed_node
from .operators import CACHED_ATTENTION

# Dimensions of an input or output of a graph to the axes by which they shrink.
Shrinking = Mapping[int, Axis]
_NOTHING: Mapping[str, Shrinking] = MappingProxyType({})
# Operators that make one dimension of several, slower ones first.
_REGROUPING = ("Reshape", "Flatten")
# Inputs of attention over a cache.
_QUERY, _KEY, _COSINES, _BIAS = 0, 1, 7, 10
# The dimension of a bias that heads are.
_HEADS = 1


class HeadAxes(NamedTuple):
    """The axes by which the heads of queries, and those of keys and values, shrink; None where they do not. ``group``:
    heads of queries to a step of their axis."""

    queries: str | None
    keys: str | None
    group: int = 1


def free_elastic_dims(model: ir.Model, seeds: Mapping[str, Dim], interface: Mapping[str, Shrinking] = _NOTHING) -> bool:
    """Follows the elastic dimensions from ``seeds`` (initializer name to its dimension 0) and frees the Reshapes.
    ``interface`` says how the graph's own inputs and outputs shrink, by their names.

    Raises SliceError naming the first node it cannot follow, and then leaves the graph as it was: every dimension is
    followed before the first Reshape changes.
    """
    _, targets = followed(model, seeds, interface)
    for node, target in targets.items():
        made = _kept_target(node, target) or reshape_target(model.graph, target)
        node.prepend(made)
        node.replace_input_with(1, made[-1].outputs[0])
    return bool(targets)


def head_axes(
    model: ir.Model, seeds: Mapping[str, Dim], interface: Mapping[str, Shrinking] = _NOTHING
) -> dict[ir.Value, HeadAxes]:
    """By what each attention over a cache returns, where any of its heads shrink; ``seeds`` and ``interface`` as of
    ``free_elastic_dims``.

    Raises SliceError where neither heads nor their size are what shrinks, where the size shrinks of heads that
    attention turns by tables, or where an elastic dimension cannot be followed.
    """
    found: dict[ir.Value, HeadAxes] = {}
    known, _ = followed(model, seeds, interface)
    for node in model.graph:
        if node.op_type == CACHED_ATTENTION:
            queries, keys = (_axis(node, index, -1, known) for index in (_QUERY, _KEY))
            group = 1 if queries is None else node.attributes["num_heads"].as_int() // queries.size
            axes = HeadAxes(_name(queries), _name(keys), group)
            if len(node.inputs) > _BIAS and _axis(node, _BIAS, _HEADS, known) != queries:
                raise SliceError(f"node {node.outputs[0].name}: a bias whose heads do not shrink with the queries'")
            if len(node.inputs) > _COSINES and node.inputs[_COSINES] is not None and _size_shrinks(node, known):
                raise SliceError(f"node {node.outputs[0].name}: heads turned by tables, whose size shrinks")
            if axes[:2] != (None, None):
                found[node.outputs[0]] = axes
    return found


def followed(
    model: ir.Model, seeds: Mapping[str, Dim], interface: Mapping[str, Shrinking] = _NOTHING
) -> tuple[Mapping[ir.Value, Dims], Mapping[ir.Node, list[Extent]]]:
    """The dimensions of every value that has an elastic one, and the new target of every Reshape that such a dimension
    reaches; nothing is changed."""
    known: dict[ir.Value, Dims] = {}
    targets: dict[ir.Node, list[Extent]] = {}
    for name, first in seeds.items():
        if name in model.graph.initializers:
            value = model.graph.initializers[name]
            known[value] = (first, *_dims(value, {})[1:])
    for value in model.graph.inputs:
        if shrinking := interface.get(value.name or ""):
            known[value] = tuple(
                (Elastic(shrinking[at]),) if at in shrinking else dim for at, dim in enumerate(_dims(value, {}))
            )
    for node in model.graph:
        given = [known[value] for value in node.inputs if value is not None and value in known]
        if not any(is_elastic(dim) for dims in given for dim in dims):
            known |= _ordered(node, known)
            continue
        rule = DIMS_BY_OPERATOR.get(node.op_type)
        if rule is None:
            raise slice_error(node, f"no rule for {node.op_type} on an elastic dimension")
        dims = rule(node, [_dims(value, known) for value in node.inputs])
        if node.op_type == "Reshape" and not _is_free(node, dims):
            targets[node] = _target(node, dims)
        if any(is_elastic(dim) for dim in dims):
            for output in node.outputs if node.op_type != CACHED_ATTENTION else node.outputs[:1]:
                known[output] = _at_extents(output, dims)
                expected = interface.get(output.name or "", {})
                found = {at: dim for at, dim in enumerate(known[output]) if is_elastic(dim)}
                if output.is_graph_output() and found != {at: (Elastic(axis),) for at, axis in expected.items()}:
                    raise slice_error(node, "an output of the model would shrink")
        else:
            known |= _in_order(node.outputs[0], dims)
    return known, targets


def _ordered(node: ir.Node, known: Mapping[ir.Value, Dims]) -> dict[ir.Value, Dims]:
    """The dimensions of what ``node`` returns, which shrink by nothing, where it is known which factors of a product
    are slower. The name of such a dimension, ``4*sequence``, does not tell."""
    rule = DIMS_BY_OPERATOR.get(node.op_type)
    if rule is None or not (node.op_type in _REGROUPING or any(value in known for value in node.inputs)):
        return {}
    try:
        return _in_order(node.outputs[0], rule(node, [_dims(value, known) for value in node.inputs]))
    except SliceError:
        return {}


def _in_order(output: ir.Value, dims: Dims) -> dict[ir.Value, Dims]:
    """``dims`` of ``output``, if one is a product with a number."""
    told = any(len(dim) > 1 and any(isinstance(factor, int) for factor in dim) for dim in dims)
    return {output: _at_extents(output, dims)} if told else {}


def _at_extents(output: ir.Value, dims: Dims) -> Dims:
    """``dims`` with the output's own extents where they are not elastic: what a Split or a Slice changes."""
    known = extents(output)
    if known is None or len(known) != len(dims):
        return dims
    return tuple(
        dim if is_elastic(dim) or _same(dim, extent) else factors(extent)
        for dim, extent in zip(dims, known, strict=True)
    )


def _same(one: Dim, extent: Extent) -> bool:
    """Whether a dimension of these factors has this extent, in whatever order that has them."""
    return sorted(map(str, factors(extent_of(one)))) == sorted(map(str, factors(extent)))


def _dims(value: ir.Value | None, known: Mapping[ir.Value, Dims]) -> Dims:
    if value is None:
        return ()
    if value in known:
        return known[value]
    if value.shape is None:
        raise SliceError(f"value {value.name}: its shape is unknown")
    named = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    # An unnamed dimension is one factor that nothing else has.
    return tuple(factors(f"{value.name}.{at}" if dim is None else dim) for at, dim in enumerate(named))


def _target(node: ir.Node, dims: Dims) -> list[Extent]:
    """The target of a Reshape whose output has ``dims``, with -1 for the one elastic dimension."""
    elastic = [index for index, dim in enumerate(dims) if is_elastic(dim)]
    if len(elastic) > 1:
        raise slice_error(node, "a Reshape target with two elastic dimensions")
    return [-1 if index in elastic else extent_of(dim) for index, dim in enumerate(dims)]


def _kept_target(node: ir.Node, target: list[Extent]) -> list[ir.Node]:
    """Nodes that make the target of a Reshape as it is put together at run time, number by number, with -1 for the one
    that ``target`` frees; none where it is not."""
    before = node.inputs[1].producer() if node.inputs[1] is not None else None
    numbers = [value for value in before.inputs if value is not None] if before is not None else []
    if before is None or before.op_type != "Concat" or len(numbers) != len(target) or -1 not in target:
        return []
    if any(extents(value) != (1,) or scalar(value) == -1 for value in numbers):
        return []
    freed = int64_constant([-1])
    numbers[target.index(-1)] = freed.outputs[0]
    return [freed, typed_node("Concat", numbers, {"axis": 0}, [len(target)])]


def _is_free(node: ir.Node, dims: Dims) -> bool:
    """Whether the target of a Reshape is put together at run time with -1 for its one elastic dimension."""
    target = node.inputs[1].producer() if node.inputs[1] is not None else None
    elastic = [index for index, dim in enumerate(dims) if is_elastic(dim)]
    if target is None or target.op_type != "Concat" or len(target.inputs) != len(dims) or len(elastic) != 1:
        return False
    return scalar(target.inputs[elastic[0]]) == -1


def _size_shrinks(node: ir.Node, known: Mapping[ir.Value, Dims]) -> bool:
    """Whether the numbers of a query's head do, which are the faster factor."""
    query = node.inputs[_QUERY]
    return query is not None and query in known and isinstance(known[query][-1][-1], Elastic)


def _name(axis: Axis | None) -> str | None:
    return None if axis is None else axis.name


def _axis(node: ir.Node, index: int, dim: int, known: Mapping[ir.Value, Dims]) -> Axis | None:
    """The axis by which the heads of dimension ``dim`` of an input shrink, which are its slower factor; None where they
    stay, as where their size shrinks."""
    value = node.inputs[index]
    first: Sequence[object] = known[value][dim] if value is not None and value in known else ()
    elastic = [factor for factor in first if isinstance(factor, Elastic)]
    if not elastic or (dim == -1 and elastic == [first[-1]]):
        return None
    if elastic != [first[0]]:
        raise SliceError(f"node {node.outputs[0].name}: what shrinks of input {index} is not its heads")
    return elastic[0].axis
