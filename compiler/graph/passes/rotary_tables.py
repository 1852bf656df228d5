"""Cosines and sines of rotary positions for every position that there is, as the graph computes them.

A graph computes angles in every step, from the positions of the new tokens. Where those of a token depend on its own
position alone they are rows of a table, which is what the same nodes return for all positions; so frequencies, their
scaling and a factor of attention stay what the model has, whatever kind of positions it is.
"""

from collections.abc import Collection, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from .matching import Extent, constant, extents, last_extent

_BY_ELEMENT = frozenset({"Add", "Cast", "Cos", "Div", "Mul", "Neg", "Sin", "Sub"})
# Positions at a time.
_CHUNK = 4096
# All tables of an engine together take as many bytes at most, or this part of the model's weights.
_LEAST_BYTES, _PART_OF_WEIGHTS = 16 << 20, 0.01


class AngleTables:
    """Cosines and sines ``[count, R / 2]`` for rotary positions of the graph, made once for each kind of them."""

    def __init__(self, model: ir.Model, positions: ir.Value, count: int, weights: Collection[str]) -> None:
        self.positions = positions
        self._model, self._count, self._weights = model, count, weights
        held = [value.const_value for name, value in model.graph.initializers.items() if name in weights]
        total = sum(tensor.nbytes for tensor in held if tensor is not None)
        self._room = max(_LEAST_BYTES, int(_PART_OF_WEIGHTS * total))
        self._known: dict[tuple[ir.Value, ir.Value, bool], list[ir.Value] | None] = {}

    def of(self, cos: ir.Value, sin: ir.Value, is_signed: bool) -> list[ir.Value] | None:
        """The tables of these values, or None where there are none; ``is_signed`` where the first half of the sines is
        negated."""
        key = cos, sin, is_signed
        if key not in self._known:
            self._known[key] = self._made(*key)
        return self._known[key]

    def _made(self, cos: ir.Value, sin: ir.Value, is_signed: bool) -> list[ir.Value] | None:
        half = last_extent(cos) // 2
        size = 2 * 4 * self._count * half
        if size > self._room:
            return None
        numbers = angle_tables(self._model, (cos, sin), self.positions, self._count, self._weights)
        if numbers is None:
            return None
        cosines, sines = numbers
        first = -sines[:, :half] if is_signed else sines[:, :half]
        if not np.array_equal(cosines[:, :half], cosines[:, half:]) or not np.array_equal(first, sines[:, half:]):
            return None  # the operator turns both numbers of a pair by one angle
        self._room -= size
        return [self._initializer(np.ascontiguousarray(array[:, half:])) for array in (cosines, sines)]

    def _initializer(self, array: np.ndarray) -> ir.Value:
        graph = self._model.graph
        value = ir.val(f"\0angles{len(graph.initializers)}", const_value=ir.tensor(array))
        graph.register_initializer(value)
        return value


def angle_tables(
    model: ir.Model, values: Sequence[ir.Value], positions: ir.Value, count: int, weights: Collection[str]
) -> list[np.ndarray] | None:
    """For each of ``values`` ``[B, .., S, .., R]`` float32, the numbers of a token at 0 to ``count`` - 1,
    ``[count, R]``.

    None where they may depend on more than the token's own number in ``positions`` ``[B, S]`` int64 and on constants;
    a tensor of ``weights`` is none, as submodels have their own. Computed by ONNX Runtime, as an engine does.
    """
    tokens, nodes = extents(positions), dict[ir.Node, None]()
    constants: dict[ir.Value, np.ndarray] = {}
    left = list(values)
    while left:
        value = left.pop()
        tensor, node = ir.convenience.get_const_tensor(value), value.producer()
        if value is positions or value in constants or node in nodes:
            continue
        if tensor is not None and value.name not in weights:
            constants[value] = tensor.numpy()
        elif node is None or not _is_of_each_token(node, tokens or ()):
            return None
        else:
            nodes[node] = None
            left += [given for given in node.inputs if given is not None]
    ordered = [node for node in model.graph if node in nodes]
    return _run(_graph(model, ordered, constants, positions, values), positions, count)


def _is_of_each_token(node: ir.Node, tokens: tuple[Extent, ...]) -> bool:
    """Whether what ``node`` returns of a token ``(B, S)`` is made of what its inputs have of that token, or of all.

    The two dimensions have names, each its own, so that a constant that differs along one of them has not its extent.
    """
    made = extents(node.outputs[0])
    if made is None or node.domain or len(tokens) != 2 or not all(isinstance(dim, str) for dim in tokens):
        return False
    named = tuple(dim for dim in made if isinstance(dim, str))
    if named not in ((), tokens) or tokens[0] == tokens[1]:
        return False
    if node.op_type == "Concat":
        return isinstance(made[node.attributes.get_int("axis", 0)], int)
    if node.op_type == "Unsqueeze":
        return constant(node, 1) is not None
    return node.op_type in _BY_ELEMENT and all(_is_spread(extents(value), made) for value in node.inputs)


def _is_spread(given: tuple[Extent, ...] | None, made: tuple[Extent, ...]) -> bool:
    """Whether every dimension of an input meets its own in the result, or is 1."""
    if given is None or len(given) > len(made):
        return False
    behind = made[len(made) - len(given) :]
    return all(dim in (own, 1) for dim, own in zip(given, behind, strict=True))


def _graph(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    constants: dict[ir.Value, np.ndarray],
    positions: ir.Value,
    values: Sequence[ir.Value],
) -> onnx.ModelProto:
    """``nodes`` alone, from ``positions`` to ``values``."""
    graph = onnx.helper.make_graph(
        [ir.to_proto(node) for node in nodes],
        "angles",
        [onnx.helper.make_tensor_value_info(positions.name or "", onnx.TensorProto.INT64, None)],
        [onnx.helper.make_tensor_value_info(value.name or "", onnx.TensorProto.FLOAT, None) for value in values],
        [onnx.numpy_helper.from_array(array, value.name) for value, array in constants.items()],
    )
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)


def _run(graph: onnx.ModelProto, positions: ir.Value, count: int) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    parts = []
    for start in range(0, count, _CHUNK):
        numbers = np.arange(start, min(start + _CHUNK, count), dtype=np.int64)
        parts.append([found.reshape(numbers.size, -1) for found in session.run(None, {positions.name: numbers[None]})])
    return [np.concatenate(part) for part in zip(*parts, strict=True)]
