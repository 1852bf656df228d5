"""Graph passes and their contract: a graph in, changed in place or not, and what holds before and after.

A pass is a function on an ``onnx_ir.Model`` that returns whether it changed anything. ``make_template.py`` has the
table of them in order; a test runs every pass of the table on traced graphs and holds it to its ``Pass``.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import onnx_ir as ir

from ....elastic import Axis
from .dims_by_operator import Dim
from .matching import extents, producer

# Elements. Larger constants, such as a causal mask or the matrices of a transform, are tables: they go to the weight
# store, or every engine would hold its own copy.
MAX_FOLDED_ELEMENTS = 64
# Names of initializers: ``W.T`` is transposed, ``W[3]`` row 3 of a stack, ``a+b`` the rows of ``a`` and then those of
# ``b``. No parameter has such a name, which is made of names of Python.
TRANSPOSED = ".T"
JOINED = "+"
TABLE_PREFIX = "table."
_ROW_NAME = re.compile(r"(?P<stack>.+)\[(?P<row>\d+)\]")


@dataclass(frozen=True)
class Given:
    """Facts for passes of a model beside its graph.

    ``parameters`` are names of weights, ``transposed`` those whose store has ``[in, out]``, and ``joinable`` those that
    may lie side by side. ``seeds`` are the first dimensions of elastic weights, and ``interface`` says how the graph's
    own inputs and outputs shrink, both as of ``free_elastic_dims``. ``module_outputs`` names the value that each module
    of the PyTorch model returns. The input of positions, where there is one, has so many ``positions``.
    """

    parameters: Collection[str]
    transposed: Collection[str] = ()
    joinable: Collection[str] = ()
    seeds: Mapping[str, Dim] = field(default_factory=dict)
    interface: Mapping[str, Mapping[int, Axis]] = field(default_factory=dict)
    module_outputs: Mapping[str, str] = field(default_factory=dict)
    positions: int | None = None

    def is_stored(self, name: str) -> bool:
        """Whether the initializer ``name`` is a tensor of the weight store: a parameter as that lays it out, a row of
        a stack, or several joined."""
        for part in joined_parts(name):
            stack, row = stack_of(part)
            plain = stack.removesuffix(TRANSPOSED)
            if plain not in self.parameters or (row is None and (plain != stack) != (plain in self.transposed)):
                return False
        return True

    def weights(self, model: ir.Model) -> set[str]:
        """The initializers of ``model`` that are made of parameters, in the layout of the store or not."""
        return {name for name in model.graph.initializers if name in self.parameters or self.is_stored(name)}


# The problem of a graph, or None.
Condition = Callable[[ir.Model, Given], str | None]


@dataclass(frozen=True)
class Pass:
    """One step from a trace to a template.

    ``run`` changes the graph in place, keeps its function, its inputs and its outputs, and returns whether it changed
    anything. Where it ``is_idempotent`` a second run changes nothing. ``graphs`` are those that it is for: ``all``,
    those that read a cache (``cached``), or those of them whose engine has operators of ONNX Runtime's own (``fused``).
    """

    name: str
    run: Callable[[ir.Model, Given], bool]
    requires: tuple[Condition, ...] = ()
    ensures: tuple[Condition, ...] = ()
    is_idempotent: bool = True
    graphs: Literal["all", "cached", "fused"] = "all"


def constants_are_initializers(model: ir.Model, _: Given) -> str | None:
    """No constant is a node of its own."""
    return _first(node.outputs[0] for node in model.graph if node.op_type == "Constant")


def extents_are_known(model: ir.Model, _: Given) -> str | None:
    """Every extent of the inputs of a product is a number or has a name."""
    products = (node for node in model.graph if node.op_type in ("MatMul", "Gemm"))
    return _first(value for node in products for value in node.inputs[:1] if extents(value) is None)


def linear_layers_are_gemm(model: ir.Model, _: Given) -> str | None:
    """No product reads a weight through a Transpose."""
    turned = ((node, producer(node, 1, "Transpose")) for node in model.graph if node.op_type in ("MatMul", "Gemm"))
    return _first(
        node.outputs[0] for node, made in turned if made and made.inputs[0] and made.inputs[0].is_initializer()
    )


def reshapes_are_merged(model: ir.Model, _: Given) -> str | None:
    """No Reshape reads another."""
    reshapes = (node for node in model.graph if node.op_type == "Reshape")
    return _first(node.outputs[0] for node in reshapes if producer(node, 0, "Reshape"))


def nothing_is_unread(model: ir.Model, _: Given) -> str | None:
    """Every node has an output that something reads."""
    dead = (node for node in model.graph if not any(value.uses() or value.is_graph_output() for value in node.outputs))
    return _first(node.outputs[0] for node in dead)


def tables_are_named(model: ir.Model, given: Given) -> str | None:
    """Every constant that no engine should hold for itself is called by its content."""
    large = ((name, value) for name, value in model.graph.initializers.items() if not given.is_stored(name))
    return _first(value for name, value in large if is_large(value) and not is_table(name))


def joined_parts(name: str) -> tuple[str, ...]:
    """The parameters whose rows lie one behind the other in the tensor ``name``; of most itself alone."""
    return tuple(name.split(JOINED))


def stack_of(name: str) -> tuple[str, int | None]:
    """The parameter and the number of the row that ``name`` stands for; no number for a whole parameter."""
    match = _ROW_NAME.fullmatch(name)
    return (match["stack"], int(match["row"])) if match else (name, None)


def is_table(name: str) -> bool:
    """Whether ``name`` is that of a table, which follows from its content."""
    return name.startswith(TABLE_PREFIX)


def is_large(value: ir.Value) -> bool:
    """Whether the initializer ``value`` is one that the weight store should hold."""
    return value.const_value is not None and value.const_value.size > MAX_FOLDED_ELEMENTS


def _first(values: Iterable[ir.Value | None]) -> str | None:
    """The name of the first value that breaks a condition."""
    return next((value.name or "?" for value in values if value is not None), None)
