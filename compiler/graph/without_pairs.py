"""The template of engines that a task is merged into: that of engines with pairs of low-rank matrices, without them.

Requires: every product with a pair's second matrix ends in a sum, perhaps behind a Reshape, and in nothing else.
Ensures: the function that pairs of zeros give, of the same weights.
"""

from __future__ import annotations

from dataclasses import replace

import onnx

from ...bundle.entries.task_entry import LORA_A, LORA_B
from ...errors import BuildError
from .passes.linear_to_gemm import TRANSPOSED
from .template import Template


def without_pairs(template: Template) -> Template:
    """``template`` with ``x W`` in the place of every ``x W + (x A) B``; itself where it has no pairs.

    Raises BuildError for a pair that is no summand.
    """
    pairs = [name for name in template.external if _plain(name).endswith((LORA_A, LORA_B))]
    if not pairs:
        return template
    proto = onnx.ModelProto()
    proto.CopyFrom(template.proto)
    graph = proto.graph
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    renamed: dict[str, str] = {}  # what is left of a sum takes its name
    for name in pairs:
        if _plain(name).endswith(LORA_B):
            for product in readers.get(name, ()):
                total, added = _sum_of(product, readers, name)
                renamed[next(value for value in total.input if value != added)] = total.output[0]
                graph.node.remove(total)
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [renamed.get(value, value) for value in values]
    _remove_unread(graph)
    if found := {tensor.name for tensor in graph.initializer}.intersection(pairs):
        raise BuildError(f"a pair of low-rank matrices, {min(found)}, is read beside its layer; nothing can be merged")
    made = {value for node in graph.node for value in node.output}
    modules = {module: value for module, value in template.module_outputs.items() if value in made}
    return replace(template, proto=proto, module_outputs=modules)


def _plain(name: str) -> str:
    return name.removesuffix(TRANSPOSED)


def _sum_of(product: onnx.NodeProto, readers: dict[str, list[onnx.NodeProto]], pair: str) -> tuple[onnx.NodeProto, str]:
    """The sum that ``product`` is a summand of, and the summand's name."""
    value = product.output[0]
    while True:
        following = readers.get(value, [])
        if len(following) == 1 and following[0].op_type == "Reshape":
            value = following[0].output[0]
        elif len(following) == 1 and following[0].op_type == "Add":
            return following[0], value
        else:
            raise BuildError(f"the pair of low-rank matrices {pair} is no summand of its layer; nothing can be merged")


def _remove_unread(graph: onnx.GraphProto) -> None:
    """Nodes and initializers that nothing reads any more."""
    outputs = {value.name for value in graph.output}
    while True:
        read = outputs | {name for node in graph.node for name in node.input}
        unread = [node for node in graph.node if read.isdisjoint(node.output)]
        if not unread:
            break
        for node in unread:
            graph.node.remove(node)
    tensors = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(tensors)
