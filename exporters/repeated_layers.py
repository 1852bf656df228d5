"""Repeats the last of few layers in a graph, until it is the graph of all layers of a model (equal_layers.py)."""

import re
from collections.abc import Mapping
from itertools import chain

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from .equal_layers import Shorter, layer_of, renumbered
from .signature import Interface

NAME_SCOPES = "pkg.torch.onnx.name_scopes"


def repeat_layers(model: ir.Model, shorter: Shorter, module: torch.nn.Module, interface: Interface) -> bool:
    """Repeats layers in the graph of ``shorter`` until it is that of ``module``. False, and the graph is of no use,
    where the last layers kept are not equal in it, or what is outside them reads what a layer has of its own."""
    graph, path, period = model.graph, shorter.path, shorter.period
    if (found := _last_layers(graph, shorter)) is None:
        return False
    last, same = found
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    inputs, outputs = {value.name: value for value in graph.inputs}, {value.name: value for value in graph.outputs}
    made = {value: value for node in last for value in node.outputs}
    behind = [use for value in made for use in value.uses() if use.node not in set(last)]
    own = dict.fromkeys(value for node in last for value in node.inputs if value and _is_own(value, path))  # in order
    end = last[-1]
    for moved in range(period, shorter.layers - shorter.kept + 1, period):
        values = {one: made[other] for one, other in same.items()}  # of the layer before
        for value in own:
            name = _moved(value, path, moved) or ""
            if value.is_initializer():
                if name not in tensors:
                    continue  # a constant, which has the same numbers in every layer
                if name not in graph.initializers:
                    graph.register_initializer(_initializer(name, tensors[name]))
                values[value] = graph.initializers[name]
            else:
                values[value] = inputs.setdefault(name, ir.Value(name=name, shape=value.shape, type=value.type))
        copies = [_copy(node, values, path, moved) for node in last]
        graph.insert_after(end, copies)
        end = copies[-1]
        made = {value: values[value] for value in made}
        outputs |= {value.name: value for value in made.values() if layer_of(value.name) >= 0}
    for use in behind:
        of_kept = use.node.inputs[use.idx]
        use.node.replace_input_with(use.idx, of_kept and made[of_kept])
    for value, repeated in made.items():
        if value.is_graph_output() and layer_of(value.name) < 0:
            outputs[value.name] = repeated
            repeated.name, value.name = value.name, f"{value.name}.0"
    if not (
        {spec.name for spec in interface.inputs} <= inputs.keys()
        and {spec.name for spec in interface.outputs} <= outputs.keys()
    ):
        return False  # an input that no layer reads, an output that is an input or another output
    graph.inputs[:] = [inputs[spec.name] for spec in interface.inputs]
    graph.outputs[:] = [outputs[spec.name] for spec in interface.outputs]
    return True


def _last_layers(graph: ir.Graph, shorter: Shorter) -> tuple[list[ir.Node], dict[ir.Value, ir.Value]] | None:
    """The nodes of the last period of layers, and what these make by what the period before makes in its place; None
    where the two differ, or what is outside the layers reads what a layer has of its own."""
    path, period, static = shorter.path, shorter.period, _static_values(graph)
    layers: list[list[ir.Node]] = [[] for _ in range(shorter.kept)]
    for node in graph:
        if (layer := _layer_at(node, path)) is not None and node.outputs[0] not in static:
            layers[layer].append(node)
    first, last = list(chain(*layers[-2 * period : -period])), list(chain(*layers[-period:]))
    same = _counterparts(first, last, path, period, static)
    inside, hidden = set(chain(*layers)), {value for node in chain(*layers[:-period]) for value in node.outputs}
    read = [(node, value) for node in graph if node not in inside for value in node.inputs if value is not None]
    if (
        same is None
        or not last
        or any(value in hidden for _, value in read)
        or any(_is_own(value, path) for node, value in read if node.outputs[0] not in static)
        or any(value in hidden for value in graph.outputs if layer_of(value.name) < 0)
    ):
        return None
    return last, same


def _layer_at(node: ir.Node, path: str) -> int | None:
    """The layer at ``path`` in which ``node`` is."""
    found = re.search(rf"'{re.escape(path)}\.(\d+)'", node.metadata_props.get(NAME_SCOPES, ""))
    return int(found[1]) if found else None


def _moved(value: ir.Value, path: str, by: int) -> str | None:
    """The name that ``value``, a parameter, an input or an output of one layer, has in the layer that lies ``by``
    further; None of any other value."""
    name = value.name or ""
    if (layer := layer_of(name)) >= 0:
        return renumbered(name, layer + by)
    at = re.compile(rf"({re.escape(path)}\.)(\d+)")
    return at.sub(lambda found: f"{found[1]}{int(found[2]) + by}", name, 1) if at.match(name) else None


def _is_own(value: ir.Value, path: str) -> bool:
    """Whether ``value`` is a parameter or an input that each layer has of its own."""
    return value.producer() is None and _moved(value, path, 0) is not None


def _static_values(graph: ir.Graph) -> dict[ir.Value, tuple[object, ...]]:
    """Constants, sizes and what is made of them alone, each with what it is: any layer may have made it for all."""
    found: dict[ir.Value, tuple[object, ...]] = {}
    for node in graph:
        read = node.inputs[0] if node.inputs else None
        if node.op_type == "Shape" and read is not None and read.shape is not None and not read.shape.has_unknown_dim():
            made: tuple[object, ...] = (*_kind(node), str(read.shape))
        elif node.op_type == "Constant" or (read is not None and all(value in found for value in node.inputs if value)):
            made = (*_kind(node), *(value and found[value] for value in node.inputs))
        else:
            continue
        found |= {value: (number, *made) for number, value in enumerate(node.outputs)}
    return found


def _counterparts(
    first: list[ir.Node],
    last: list[ir.Node],
    path: str,
    period: int,
    static: Mapping[ir.Value, tuple[object, ...]],
) -> dict[ir.Value, ir.Value] | None:
    """Values that the ``first`` of two equal pieces of a graph makes, with those of the ``last``; None where they
    differ."""
    same: dict[ir.Value, ir.Value] = {}
    made = {value for node in first for value in node.outputs}
    for one, other in zip(first, last, strict=False):
        if _kind(one) != _kind(other):
            return None
        for a, b in zip(one.inputs, other.inputs, strict=True):
            if a is b:
                continue
            if a is None or b is None:
                return None
            is_static = a in static and static[a] == static.get(b)
            is_own = _is_own(a, path) and _moved(a, path, period) == b.name
            is_of_layer_before = b in made and a not in made
            if not (is_static or is_own or is_of_layer_before or (a in made and same.get(a) is b)):
                return None
        same |= zip(one.outputs, other.outputs, strict=True)
    return same if len(first) == len(last) else None


def _kind(node: ir.Node) -> tuple[object, ...]:
    """Operation of ``node`` on its inputs."""
    attributes = {
        name: (each.type, each.value.tobytes() if isinstance(each.value, ir.TensorProtocol) else str(each.value))
        for name, each in node.attributes.items()
    }
    return node.domain, node.op_type, node.overload, attributes, len(node.inputs), len(node.outputs)


def _initializer(name: str, tensor: torch.Tensor) -> ir.Value:
    constant = tensor_adapters.TorchTensor(tensor, name=name)
    return ir.Value(name=name, shape=constant.shape, type=ir.TensorType(constant.dtype), const_value=constant)


def _copy(node: ir.Node, values: dict[ir.Value, ir.Value], path: str, moved: int) -> ir.Node:
    """``node`` of the layer that lies ``moved`` further, on ``values`` in place of its own, which have its outputs
    then."""
    scopes = re.sub(
        rf"(?<=')({re.escape(path)}\.)(\d+)",
        lambda found: f"{found[1]}{int(found[2]) + moved}",
        node.metadata_props.get(NAME_SCOPES, ""),
    )
    copied = ir.Node(
        node.domain,
        node.op_type,
        [value and values.get(value, value) for value in node.inputs],
        node.attributes.values(),
        overload=node.overload,
        outputs=[
            ir.Value(name=_moved(value, path, moved) or f"{value.name}.{moved}", shape=value.shape, type=value.type)
            for value in node.outputs
        ],
        version=node.version,
        name=f"{node.name}_{moved}",
        metadata_props={**node.metadata_props, NAME_SCOPES: scopes},
    )
    values.update(zip(node.outputs, copied.outputs, strict=True))
    return copied
