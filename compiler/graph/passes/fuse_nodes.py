"""Several nodes as one in KV-cache engines, whose step of one token costs as much by its nodes as by its products.

Norms, sums before them and SiLU become operators of ONNX Runtime's own; products of one value become one product, over
weights that lie side by side; and what attention over a cache reads of such a product becomes its one input. Rotary
positions are fused by ``fuse_rotary.py``.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from ....profiles.precision import LEAST_OUTPUTS
from .contract import JOINED
from .matching import extents, is_last, last_extent, new_weight, producer, replace, reshape_target, scalar, sliced
from .operators import CACHED_ATTENTION, MICROSOFT, NORM

# Inputs of attention over a cache: queries, keys and values.
_PARTS = 3


def fuse_norms(model: ir.Model) -> bool:
    """Applies three rules wherever they match. Nodes left unused stay for dead-code removal.

    1. ``w * (x * (1 / sqrt(mean(x ** 2) + e)))`` over the last dimension is ``SimplifiedLayerNormalization``.
    2. That of a sum ``a + b`` is ``SkipSimplifiedLayerNormalization``, which gives the sum too.
    3. ``x * sigmoid(x)`` is ``QuickGelu``.
    """
    changed = False
    for node in list(model.graph):
        changed |= _fuse_norm(node) or _fuse_silu(node)
    for node in list(model.graph):
        changed |= _add_before_norm(node)
    model.graph.sort()  # a weight may be made behind the sum whose norm it scales
    return changed


def join_products(model: ir.Model, parameters: Collection[str]) -> bool:
    """Joins the products of each value by ``parameters``, those with a bias and those without: queries, keys and
    values are three products of the same tokens.

    Rows of a weight ``[out, in]`` are outputs, so that weights one behind the other are one weight, called by its
    parts, ``a+b+c``, whose outputs a Split takes apart. Parts that something else reads too are left, and so are those
    of so few outputs that integers never take their place: joined they would get an encoding that they have nowhere
    else.
    """
    graph = model.graph
    products: dict[tuple[ir.Value, int], list[ir.Node]] = {}
    for node in graph:
        if _is_product(node, parameters) and node.inputs[0] is not None:
            products.setdefault((node.inputs[0], len(node.inputs)), []).append(node)
    several = {key: nodes for key, nodes in products.items() if len(nodes) > 1}
    for (x, inputs), nodes in several.items():
        made = [_side_by_side(graph, [_initializer(node, index) for node in nodes]) for index in range(1, inputs)]
        _join(graph, nodes, [x, *made])
    return bool(several)


def pack_attention(model: ir.Model) -> bool:
    """Gives attention over a cache one input where its queries, keys and values lie side by side in one value.

    The operator takes ``[B, S, (A + 2 K) * D]`` for ``A`` heads of queries and ``K`` of keys and of values, with
    nothing in the places of its second and third input. So what takes them apart behind one product, a Split or Slices,
    is not needed, nor are the Reshapes behind that. Parts that something else reads, or in another order, are left.
    """
    packed = [node for node in model.graph if node.op_type == CACHED_ATTENTION and _pack(model.graph, node)]
    return bool(packed)


class _Norm(NamedTuple):
    x: ir.Value
    weight: ir.Value
    epsilon: float


def _fuse_norm(node: ir.Node) -> bool:
    """Rule 1, at the product with the weight."""
    found = next((norm for side in (0, 1) if (norm := _norm(node, side)) is not None), None)
    if found is None:
        return False
    attributes = {"axis": -1, "epsilon": found.epsilon, "stash_type": 1}
    fused = ir.node(NORM, [found.x, found.weight], attributes=attributes)
    node.prepend(fused)
    replace(node.outputs[0], fused.outputs[0])
    return True


def _norm(node: ir.Node, side: int) -> _Norm | None:
    """The norm whose last product is ``node``, with the normalised value on ``side``."""
    normalised = producer(node, side, "Mul") if node.op_type == "Mul" else None
    if normalised is None:
        return None
    for inverse in (0, 1):
        root = producer(producer(normalised, inverse, "Reciprocal"), 0, "Sqrt")
        total = producer(root, 0, "Add")
        mean, epsilon = producer(total, 0, "ReduceMean"), scalar(total.inputs[1]) if total else None
        power = producer(mean, 0, "Pow")
        x, weight = normalised.inputs[1 - inverse], node.inputs[1 - side]
        dims = extents(x)
        if mean is None or power is None or epsilon is None or x is None or weight is None or dims is None:
            continue
        over = scalar(mean.inputs[1]) if len(mean.inputs) > 1 else None
        of_last = is_last(over, x) and mean.attributes.get_int("keepdims", 1) == 1
        if of_last and power.inputs[0] is x and scalar(power.inputs[1]) == 2 and extents(weight) == dims[-1:]:
            return _Norm(x, weight, epsilon)
    return None


def _add_before_norm(norm: ir.Node) -> bool:
    """Rule 2, at the norm."""
    add = producer(norm, 0, "Add") if norm.op_type == NORM else None
    if add is None or add.outputs[0].is_graph_output():
        return False
    dims, total = extents(add.outputs[0]), add.outputs[0]
    if dims is None or len(dims) != 3 or any(extents(part) != dims for part in add.inputs):
        return False
    attributes = {"epsilon": norm.attributes.get_float("epsilon", 1e-5)}
    inputs = [*add.inputs, norm.inputs[1]]
    fused = ir.node("SkipSimplifiedLayerNormalization", inputs, attributes, domain=MICROSOFT, num_outputs=4)
    add.prepend(fused)  # before all that reads the sum
    replace(norm.outputs[0], fused.outputs[0])
    replace(total, fused.outputs[3])
    return True


def _fuse_silu(node: ir.Node) -> bool:
    """Rule 3, at the product."""
    for side in (0, 1):
        sigmoid = producer(node, side, "Sigmoid") if node.op_type == "Mul" else None
        if sigmoid is not None and sigmoid.inputs[0] is node.inputs[1 - side]:
            fused = ir.node("QuickGelu", [sigmoid.inputs[0]], {"alpha": 1.0}, domain=MICROSOFT)
            node.prepend(fused)
            replace(node.outputs[0], fused.outputs[0])
            return True
    return False


def _is_product(node: ir.Node, parameters: Collection[str]) -> bool:
    """Whether ``node`` is ``x W' + b``, or that without ``b``, of parameters that nothing else reads."""
    factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    turned = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
    if node.op_type != "Gemm" or factors != [1.0, 1.0] or turned != [0, 1] or node.outputs[0].is_graph_output():
        return False
    is_own = all(
        value is not None and value.is_initializer() and value.name in parameters and len(value.uses()) == 1
        for value in node.inputs[1:]
    )
    return is_own and _rows(_initializer(node, 1)) >= LEAST_OUTPUTS


def _initializer(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _side_by_side(graph: ir.Graph, parts: list[ir.Value]) -> ir.Value:
    """A new initializer of the rows of all ``parts``."""
    tensors = [part.const_value for part in parts if part.const_value is not None]
    shape = [sum(map(_rows, parts)), *tensors[0].shape.numpy()[1:]]
    name = JOINED.join(part.name or "" for part in parts)
    return new_weight(graph, name, shape, tensors[0].dtype, lambda: np.concatenate([t.numpy() for t in tensors]))


def _join(graph: ir.Graph, nodes: list[ir.Node], inputs: list[ir.Value]) -> None:
    """Puts one product of ``inputs`` in the place of ``nodes``, where the first of them is, and a Split behind it."""
    weights = [_initializer(node, 1) for node in nodes]
    product = ir.node("Gemm", inputs, {"transB": 1})
    rows = ir.Value(name=f"{inputs[1].name}.rows", const_value=ir.tensor(np.array(list(map(_rows, weights)), np.int64)))
    graph.register_initializer(rows)
    split = ir.node("Split", [product.outputs[0], rows], {"axis": -1}, num_outputs=len(nodes))
    whole, first = product.outputs[0], nodes[0].outputs[0]
    dims = extents(first)
    assert dims is not None
    whole.shape, whole.type = ir.Shape([dims[0], sum(map(_rows, weights))]), first.type
    nodes[0].prepend([product, split])
    for node, part in zip(nodes, split.outputs, strict=True):
        part.meta.update(node.outputs[0].meta)
        replace(node.outputs[0], part)
    unread = [_initializer(node, index) for node in nodes for index in range(1, len(inputs))]
    graph.remove(nodes, safe=True)
    for value in unread:
        del graph.initializers[value.name or ""]


def _rows(weight: ir.Value) -> int:
    tensor = weight.const_value
    assert tensor is not None
    return int(tensor.shape.numpy()[0])


def _pack(graph: ir.Graph, attention: ir.Node) -> bool:
    """Whether ``attention`` could be packed, and was."""
    backs = [producer(attention, index, "Reshape") for index in range(_PARTS)]
    found = [back for back in backs if back is not None]
    parts = [attention.inputs[index] if back is None else back.inputs[0] for index, back in enumerate(backs)]
    taken = [part for part in parts if part is not None]
    whole = _whole(taken) if len(taken) == _PARTS and _are_heads(attention, taken) else None
    rows = {(extents(back.outputs[0]) or ())[:-1] for back in found}
    if whole is None or len(found) not in (0, _PARTS) or len(rows) > 1 or any(len(dims) != 2 for dims in rows):
        return False
    if any(len(value.uses()) > 1 for value in (*taken, *(back.outputs[0] for back in found))):
        return False
    if any(last_extent(back.outputs[0]) != last_extent(part) for back, part in zip(found, taken, strict=False)):
        return False  # parts of each head, which do not lie as the operator takes them
    for dims in rows:
        target = reshape_target(graph, [*dims, -1])
        reshape = ir.node("Reshape", [whole, target[-1].outputs[0]])
        attention.prepend([*target, reshape])
        whole = reshape.outputs[0]
    for index, value in enumerate([whole, None, None]):
        attention.replace_input_with(index, value)
    makers = dict.fromkeys(node for part in taken if (node := part.producer()) is not None)
    graph.remove([*found, *makers], safe=True)
    return True


def _whole(parts: Sequence[ir.Value]) -> ir.Value | None:
    """The value in whose last dimension ``parts`` lie side by side: that which one Split, or Slices, take them from."""
    makers = [part.producer() for part in parts]
    first = makers[0]
    whole = None if first is None else first.inputs[0]
    if first is None or whole is None:
        return None
    if first.op_type == "Split":
        return whole if is_last(first.attributes.get_int("axis", 0), whole) and [*first.outputs] == [*parts] else None
    begin = 0
    for part, maker in zip(parts, makers, strict=True):
        end = begin + last_extent(part)
        if sliced(maker, whole) != (begin, end):
            return None
        begin = end
    return whole if begin == last_extent(whole) else None


def _are_heads(attention: ir.Node, parts: Sequence[ir.Value]) -> bool:
    """Whether ``parts`` are heads of one size."""
    numbers = [attention.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
    size = last_extent(parts[-1]) // max(1, numbers[-1])
    return size > 0 and [last_extent(part) for part in parts] == [number * size for number in numbers]
