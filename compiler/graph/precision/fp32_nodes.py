"""Where a graph in 16 bits computes in float32: what sums, what normalises, what decides, and what answers.

Every operation on float32 gets one of two widths. Products, and what is computed element by element, are narrow, but
for the nodes that are kept in float32, which are wide:

1. Softmax, normalisations, reductions, powers and logarithms; and what has no such type in ONNX, or is not known here
   to have one in TensorRT.
2. Nodes between a Softmax and the product before it: masks are added to scores in float32.
3. Nodes between a decision (TopK, ArgMax, a comparison), or an output that the caller names, and the product before
   it, that product included: rounding must not choose another expert, or leave at another exit.
4. Readers of an intermediate result of a normalisation (an *open* value), so that one spelled out as
   ``x * reciprocal(sqrt(mean(x ** 2) + eps))`` is wide as one operation would be. It ends where it meets ``x`` again.
   So are scores that a decision compares: what is computed of them alone, such as gates by many rounds, is wide.
5. Readers of a constant that the narrow type has not; its result is open.

Data movement is as wide as what it moves.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import onnx

MOVEMENT = frozenset(
    [
        *("Cast", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape"),
        *("Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
    ]
)
_PRODUCT_OPERATORS = frozenset({"Conv", "Gemm", "MatMul"})
_ELEMENTWISE_OPERATORS = frozenset(
    [
        *("Abs", "Add", "Clip", "Concat", "Div", "Erf", "Gelu", "Max", "Min", "Mul", "Neg", "Relu", "ScatterElements"),
        *("ScatterND", "Sigmoid", "Sub", "Tanh", "Where"),
    ]
)
_FP32_MATH = frozenset({"CumSum", "Exp", "Log", "Pow", "Reciprocal", "Sqrt"})
_CHOICE_OPERATORS = frozenset({"ArgMax", "ArgMin", "Hardmax", "NonZero", "TopK"})
_COMPARISON_OPERATORS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
# Read a value for something that no rounding changes.
_ROUNDING_FREE_OPERATORS = frozenset({"IsInf", "IsNaN", "Shape", "Size"})
_SOFTMAX_OPERATORS = frozenset({"LogSoftmax", "Softmax"})


def fp32_products(proto: onnx.ModelProto, outputs: Collection[str]) -> frozenset[str]:
    """Names of the values (outputs of Gemm and MatMul nodes) that feed decisions or, through no other product, one of
    ``outputs``."""
    graph = FloatGraph(proto)
    return frozenset(node.output[0] for node in graph.answering(outputs) if node.op_type in {"Gemm", "MatMul"})


def wide_nodes(proto: onnx.ModelProto, outputs: Collection[str], lost: Collection[str], narrow: int) -> frozenset[str]:
    """First outputs of the nodes that compute on float32 and stay there, heads of ``outputs`` among them.

    ``lost`` names the constants that the type ``narrow``, such as ``TensorProto.BFLOAT16``, has not.
    """
    graph = FloatGraph(proto)
    chosen = {node.output[0] for node in (*graph.answering(outputs), *graph.before_softmax())}
    refusing = _refusing(proto, narrow)
    chosen |= {node.output[0] for node in proto.graph.node if node.op_type in refusing}
    scores = {node.output[0] for node in graph.compared()}
    widths = _forward(graph, chosen, scores, lost)
    _backward(graph, widths, chosen)
    return frozenset(
        node.output[0] for node in proto.graph.node if widths.get(node.output[0]) in {_Width.OPEN, _Width.CLOSED}
    )


@dataclass(frozen=True)
class FloatGraph:
    """Which values of a graph are float32, who makes them and who reads them."""

    proto: onnx.ModelProto

    @cached_property
    def floats(self) -> frozenset[str]:
        return frozenset(name for name, kind in element_types(self.proto).items() if kind == onnx.TensorProto.FLOAT)

    @cached_property
    def constants(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.proto.graph.initializer)

    @cached_property
    def makers(self) -> dict[str, onnx.NodeProto]:
        return {name: node for node in self.proto.graph.node for name in node.output}

    @cached_property
    def readers(self) -> dict[str, list[onnx.NodeProto]]:
        readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.proto.graph.node:
            for name in node.input:
                readers.setdefault(name, []).append(node)
        return readers

    @cached_property
    def matrices(self) -> frozenset[str]:
        """Tensors of the store that are more than vectors."""
        tensors = self.proto.graph.initializer
        return frozenset(t.name for t in tensors if t.data_location == t.EXTERNAL and len(t.dims) > 1)

    @cached_property
    def outputs(self) -> frozenset[str]:
        return frozenset(value.name for value in self.proto.graph.output)

    def computes(self, node: onnx.NodeProto) -> bool:
        """Whether ``node`` has a width: it makes float32 values, or reads them and what they are matters."""
        if any(name in self.floats for name in node.output):
            return True
        return node.op_type not in {*_ROUNDING_FREE_OPERATORS, "Cast"} and any(
            name in self.floats for name in node.input
        )

    def answering(self, outputs: Collection[str]) -> Iterator[onnx.NodeProto]:
        """Decisions, what makes ``outputs``, and what leads to both, up to the products before them, which are among
        it."""
        yield from (node for node in self.proto.graph.node if self._decides(node))
        yield from self.compared()
        yield from self.behind(outputs, lambda node: node.op_type not in _PRODUCT_OPERATORS)

    def compared(self) -> Iterator[onnx.NodeProto]:
        """Nodes behind the scores that decisions compare, up to the products before them, which are among it."""
        starts = [name for node in self.proto.graph.node if self._decides(node) for name in node.input]
        return self.behind(starts, lambda node: node.op_type not in _PRODUCT_OPERATORS)

    def before_softmax(self) -> Iterator[onnx.NodeProto]:
        """Nodes between each Softmax and the product before it."""
        passed = MOVEMENT | _ELEMENTWISE_OPERATORS
        starts = [node.input[0] for node in self.proto.graph.node if node.op_type in _SOFTMAX_OPERATORS]
        return (node for node in self.behind(starts, lambda node: node.op_type in passed) if node.op_type in passed)

    def _decides(self, node: onnx.NodeProto) -> bool:
        return node.op_type in _CHOICE_OPERATORS or (
            node.op_type in _COMPARISON_OPERATORS and node.input[0] in self.floats
        )

    def behind(self, names: Iterable[str], passes: Callable[[onnx.NodeProto], bool]) -> Iterator[onnx.NodeProto]:
        """The nodes from which ``names`` follow; nothing behind one that does not pass."""
        left, seen = list(names), set[str]()
        while left:
            node = self.makers.get(left.pop())
            if node is None or node.output[0] in seen:
                continue
            seen.add(node.output[0])
            yield node
            if passes(node):
                left += node.input


def element_types(proto: onnx.ModelProto) -> dict[str, int]:
    """The element type of every value, constants included; no shapes need to be known."""
    graph = onnx.shape_inference.infer_shapes(proto).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {value.name: value.type.tensor_type.elem_type for value in values} | {
        tensor.name: tensor.data_type for tensor in graph.initializer
    }


def _refusing(proto: onnx.ModelProto, narrow: int) -> set[str]:
    """The operators that have no such type in the graph's opset, as Conv has no bfloat16 before 22."""
    opset = next(entry.version for entry in proto.opset_import if entry.domain in {"", "ai.onnx"})
    kinds = {node.op_type for node in proto.graph.node} & (_PRODUCT_OPERATORS | _ELEMENTWISE_OPERATORS | MOVEMENT)
    schemas = {kind: onnx.defs.get_schema(kind, opset, "") for kind in kinds}
    name = f"tensor({onnx.TensorProto.DataType.Name(narrow).lower()})"
    return {
        kind
        for kind, schema in schemas.items()
        if not any(name in constraint.allowed_type_strs for constraint in schema.type_constraints)
    }


class _Width(Enum):
    NARROW = 0
    FREE = 1  # made of constants and masks alone: as wide as what reads it
    CLOSED = 2  # wide, may be narrowed by who reads it
    OPEN = 3  # wide, and among fp32-kept nodes that go on


def _forward(
    graph: FloatGraph, chosen: Collection[str], scores: Collection[str], lost: Collection[str]
) -> dict[str, _Width]:
    """A width for every value that is computed, from the inputs on."""
    widths = {value.name: _Width.CLOSED for value in graph.proto.graph.input}
    for tensor in graph.proto.graph.initializer:
        # Lookups in a weight, such as an embedding, read the narrow one: a wide one is twice as large.
        free = _Width.NARROW if tensor.name in graph.matrices else _Width.FREE
        widths[tensor.name] = _Width.OPEN if tensor.name in lost else free
    for node in graph.proto.graph.node:
        if not graph.computes(node):
            continue
        given = [widths[name] for name in node.input if name in graph.floats]
        width = _width(node, given, any(name in lost for name in node.input))
        if node.output[0] in chosen:
            width = _Width.OPEN if node.output[0] in scores else _Width.CLOSED
        for name in node.output:
            widths[name] = width
    return widths


def _width(node: onnx.NodeProto, given: list[_Width], reads_lost: bool) -> _Width:
    kind = node.op_type
    if kind in _PRODUCT_OPERATORS:
        return _Width.CLOSED if reads_lost else _Width.NARROW
    if not given:  # made of whole numbers or of none
        return _Width.CLOSED
    if kind in MOVEMENT:
        return given[0]
    if kind in _FP32_MATH or kind.startswith("Reduce"):
        return _Width.OPEN
    if kind not in _ELEMENTWISE_OPERATORS:
        return _Width.CLOSED
    if reads_lost:
        return _Width.OPEN  # such as a divisor that is kept from zero
    if _Width.OPEN in given:
        return _Width.OPEN if set(given) <= {_Width.OPEN, _Width.FREE} else _Width.CLOSED
    return _Width.FREE if set(given) == {_Width.FREE} else _Width.NARROW


def _backward(graph: FloatGraph, widths: dict[str, _Width], chosen: Collection[str]) -> None:
    """Settles, from the outputs on, what may be as wide as what reads it: then a value is cast once, or never."""
    wide = {_Width.OPEN, _Width.CLOSED}
    for node in reversed(graph.proto.graph.node):
        width = widths.get(node.output[0])
        if width is None or node.output[0] in chosen:
            continue
        readers = [part for name in node.output for part in graph.readers.get(name, []) if graph.computes(part)]
        read = {widths[part.output[0]] in wide for part in readers}
        read |= {True for name in node.output if name in graph.outputs}
        settled = width
        if width is _Width.FREE:
            settled = _Width.CLOSED if read == {True} else _Width.NARROW
        elif width is _Width.CLOSED and node.op_type in MOVEMENT and read == {False}:
            settled = _Width.NARROW
        elif width is _Width.NARROW and node.op_type in _ELEMENTWISE_OPERATORS and read == {True}:
            given = [widths[name] for name in node.input if name in graph.floats and name not in graph.constants]
            settled = _Width.CLOSED if all(other is not _Width.NARROW for other in given) else width
        for name in node.output:
            widths[name] = settled
