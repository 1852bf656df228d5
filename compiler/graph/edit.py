"""A template's graph under change."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .passes.operators import MICROSOFT


class Edit:
    """A copy of a graph whose nodes are written anew, one after the other; ``done`` returns it.

    Weights are read in other encodings, constants are held once, and no two values get one name.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._model = onnx.ModelProto()
        self._model.CopyFrom(proto)
        graph = self._model.graph
        self.source = list(graph.node)
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        values = (*graph.input, *graph.output)
        taken = {*self.initializers, *(value.name for value in values)}
        taken.update(name for node in graph.node for name in node.output)
        self._fresh: Iterator[str] = (name for name in (f"q{number}" for number in count()) if name not in taken)

    def add(
        self, kind: str, inputs: Iterable[str], outputs: Iterable[str] | int = 1, domain: str = "", **attributes: Any
    ) -> str:
        """Writes a node with ``outputs``, or so many new ones; returns the first."""
        names = [next(self._fresh) for _ in range(outputs)] if isinstance(outputs, int) else list(outputs)
        self.nodes.append(helper.make_node(kind, list(inputs), names, domain=domain or None, **attributes))
        return names[0]

    def constant(self, array: np.ndarray) -> str:
        """The initializer that holds ``array``."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constants[key] = next(self._fresh)
            self.initializers[name] = numpy_helper.from_array(array, name)
        return self._constants[key]

    def encoded(self, weight: str, encoding: str, data_type: int, shape: Iterable[int]) -> str:
        """The initializer that reads ``weight`` from the store in ``encoding``."""
        name = weight + encoding
        if name not in self.initializers:
            external = onnx.TensorProto.EXTERNAL
            self.initializers[name] = onnx.TensorProto(
                name=name, data_type=data_type, dims=list(shape), data_location=external
            )
        return name

    def decoded_int4(self, integers: str, scales: str) -> str:
        """The float32 numbers ``[..., blocks, bytes, 2]`` of ``integers`` ``[..., blocks, bytes]`` with ``scales``
        ``[..., blocks]``: a byte is looked up as the two numbers in it."""
        low, high = np.arange(256) % 16 - 8, np.arange(256) // 16 - 8
        pairs = self.constant(np.stack([low, high], axis=1).astype(np.float32))
        numbers = self.add("Gather", [pairs, self.add("Cast", [integers], to=onnx.TensorProto.INT32)], axis=0)
        last = self.constant(np.array([-2, -1], np.int64))
        return self.add("Mul", [numbers, self.add("Unsqueeze", [scales, last])])

    def done(self) -> onnx.ModelProto:
        """The graph with the new nodes, without what none of them leads to an output."""
        graph = self._model.graph
        del graph.node[:], graph.initializer[:]
        graph.node.extend(_live(self.nodes, {value.name for value in graph.output}))
        used = uses(graph)
        graph.initializer.extend(tensor for name, tensor in self.initializers.items() if name in used)
        domains = {node.domain for node in graph.node}
        if MICROSOFT in domains and all(entry.domain != MICROSOFT for entry in self._model.opset_import):
            self._model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
        return self._model


def uses(graph: onnx.GraphProto) -> Counter[str]:
    """How often each value is read, by nodes and as an output of the graph."""
    read = Counter(name for node in graph.node for name in _read(node))
    read.update(value.name for value in graph.output)
    return read


def _live(nodes: Iterable[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    wanted, live = set(outputs), []
    for node in reversed(list(nodes)):
        if wanted.intersection(node.output):
            wanted.update(_read(node))
            live.append(node)
    return live[::-1]


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Values that a node and the graphs inside it read."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                yield from _read(inner)
            yield from (value.name for value in attribute.g.output)
