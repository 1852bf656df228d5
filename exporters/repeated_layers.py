"""Traces a model with few of its equal layers, and repeats the last of these in the graph.

What torch.export takes grows with the number of layers. Layers are equal where passes on tensors without numbers call
the same operations on the same places: on parameters of their own under the same names, on what the layer before left,
and on what lies outside all layers. A model with the first layers alone is passed too, and must be the whole one but
for layers that repeat.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple, Protocol

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export._trace import _compiling_state_context
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ..bucket import Bucket
from ..bundle.entries.generation_entry import PAST, PRESENT
from ..bundle.entries.tensor_spec import TensorSpec

NAME_SCOPES = "pkg.torch.onnx.name_scopes"
_NUMBERED = re.compile(rf"((?:{PAST}|{PRESENT})\w+_)(\d{{1,6}})")
_PERIODS = range(1, 7)
# Fewer are traced as they are: two passes cost what some layers do.
_LEAST_LEFT_OUT = 4


class Interface(Protocol):
    """Inputs and outputs of a module, by position."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...


@dataclass(frozen=True)
class Shorter:
    """``module`` with the first ``kept`` of the ``layers`` at ``path``, the last ``period`` of which repeat."""

    module: torch.nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    path: str
    layers: int
    kept: int
    period: int


def shortened(module: torch.nn.Module, interface: Interface, example: tuple[torch.Tensor, ...]) -> Shorter | None:
    """``module`` with fewer layers, where the others are proven to repeat those kept; None elsewhere."""
    stacks = {
        name: stack
        for name, stack in module.named_modules()
        if isinstance(stack, torch.nn.ModuleList) and len({type(layer) for layer in stack}) == 1
    }
    path = max(stacks, key=lambda name: len(stacks[name]), default="")
    layers = len(stacks.get(path, ()))
    if layers < _LEAST_LEFT_OUT + 2 or (whole := _read(module, interface, example, path)) is None:
        return None
    kept, period = min((whole.needed(period), period) for period in _PERIODS)
    if layers - kept < _LEAST_LEFT_OUT:
        return None
    stays = [_layer_of(spec.name) < kept for spec in interface.inputs]
    found = Shorter(
        _with_first(module, path, kept),
        tuple(compress(interface.inputs, stays)),
        tuple(spec for spec in interface.outputs if _layer_of(spec.name) < kept),
        path,
        layers,
        kept,
        period,
    )
    few = _read(found.module, found, tuple(compress(example, stays)), path)
    return found if few is not None and whole.repeats(few, period) else None


def _with_first(module: torch.nn.Module, path: str, kept: int) -> torch.nn.Module:
    """A copy of ``module`` on the same tensors, with the first ``kept`` layers at ``path``."""
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    found = copy.deepcopy(module, memo)
    owner, _, name = path.rpartition(".")
    setattr(found.get_submodule(owner), name, found.get_submodule(path)[:kept])
    if isinstance(own := getattr(found, "layers", None), (list, tuple)):  # what a cache keeps of each
        found.layers = own[:kept]
    return found


def _layer_of(name: str) -> int:
    """The layer of which ``name`` is a tensor of a cache, -1 for other names."""
    found = _NUMBERED.fullmatch(name)
    return int(found[2]) if found else -1


_Step = tuple[object, ...]


class _Place(NamedTuple):
    """Origin of a tensor: a name or an output of a step, of a layer that is so many behind the reader, or of none."""

    behind: int | None
    what: _Step


@dataclass
class _Reading:
    """The steps of a pass before, in and behind its layers, and the origins of its outputs."""

    before: list[_Step] = field(default_factory=list)
    layers: list[list[_Step]] = field(default_factory=list)
    behind: list[_Step] = field(default_factory=list)
    outputs: dict[str, _Place] = field(default_factory=dict)

    def needed(self, period: int) -> int:
        """Number of first layers from which all others follow: two periods of those that repeat."""
        steps, many = self.layers, len(self.layers)
        differs = (i + 1 for i in reversed(range(period, many)) if steps[i] != steps[i - period])
        kept = next(differs, period) + period
        return kept + (many - kept) % period

    def repeats(self, few: _Reading, period: int) -> bool:
        """Whether this pass is ``few`` with the last ``period`` of its layers repeated."""
        kept = len(few.layers)
        origins = {name: self.outputs.get(_renumbered(name, _layer_of(name) - period), None) for name in self.outputs}
        return (
            (few.before, few.behind, few.layers) == (self.before, self.behind, self.layers[:kept])
            and all(self.layers[i] == self.layers[i - period] for i in range(kept, len(self.layers)))
            and few.outputs == {name: place for name, place in self.outputs.items() if _layer_of(name) < kept}
            and all(self.outputs[name] == origins[name] for name in origins if _layer_of(name) >= kept)
        )


def _renumbered(name: str, layer: int) -> str:
    return _NUMBERED.sub(lambda found: f"{found[1]}{layer}", name)


class _NotInTurnError(Exception):
    """Layers that are not called once each, one behind the other, or that read what has no name."""


class _Log(TorchDispatchMode):
    """Notes the steps of a pass. ``known``: names of tensors by their identity, each with its layer."""

    def __init__(self, known: Mapping[int, tuple[int | None, _Step]]) -> None:
        super().__init__()
        self.found, self.layer = _Reading(), -1
        self._known, self._inside = dict(known), False
        self._held: list[object] = []  # so that no identity comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = self.found
        at = found.layers[-1] if self._inside else found.behind if found.layers else found.before
        where = self.layer if self._inside else None
        reader = self.layer if self._inside else self.layer + 1
        given, form = tree_flatten((args, kwargs or {}))
        returned, _ = tree_flatten(result)
        read = tuple(self.place(each, reader) if isinstance(each, torch.Tensor) else each for each in given)
        sizes = tuple((each.dtype, tuple(each.shape)) for each in returned if isinstance(each, torch.Tensor))
        for number, each in enumerate(returned):
            if isinstance(each, torch.Tensor):
                self._known.setdefault(id(each), (where, ("made", bool(found.layers), len(at), number)))
        self._held.append((given, returned))
        at.append((func, str(form), read, sizes))
        return result

    def place(self, tensor: torch.Tensor, reader: int) -> _Place:
        if id(tensor) not in self._known:
            raise _NotInTurnError
        layer, what = self._known[id(tensor)]
        return _Place(None if layer is None else reader - layer, what)

    def enter(self, layer: int) -> None:
        if self._inside or layer != self.layer + 1 or self.found.behind:
            raise _NotInTurnError
        self.layer, self._inside = layer, True
        self.found.layers.append([])

    def leave(self) -> None:
        self._inside = False


def _read(
    module: torch.nn.Module, interface: Interface, example: tuple[torch.Tensor, ...], path: str
) -> _Reading | None:
    """The steps of ``module``, whose layers are at ``path``; None where they are not called in turn."""
    known: dict[int, tuple[int | None, _Step]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        layer, _, own = name.removeprefix(f"{path}.").partition(".")
        inside = name.startswith(f"{path}.")
        known.setdefault(id(tensor), (int(layer) if inside else None, ("own", own if inside else name)))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [fake.from_tensor(tensor) for tensor in example]
    for spec, tensor in zip(interface.inputs, inputs, strict=True):
        layer = _layer_of(spec.name)
        known[id(tensor)] = (layer if layer >= 0 else None, ("input", _renumbered(spec.name, 0)))
    log, stack = _Log(known), module.get_submodule(path)
    assert isinstance(stack, torch.nn.ModuleList)
    hooks = [layer.register_forward_pre_hook(lambda *_, number=number: log.enter(number)) for number, layer in enumerate(stack)]
    hooks += [layer.register_forward_hook(lambda *_: log.leave()) for layer in stack]
    try:
        with fake, torch.no_grad(), _compiling_state_context(), log:
            outputs = module(*inputs)
        many = len(stack)
        if len(log.found.layers) != many:
            return None
        for spec, tensor in zip(interface.outputs, outputs, strict=True):
            layer = _layer_of(spec.name)
            log.found.outputs[spec.name] = log.place(tensor, layer if layer >= 0 else many)
    except _NotInTurnError:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return log.found


def repeat_layers(model: ir.Model, shorter: Shorter, module: torch.nn.Module, interface: Interface) -> bool:
    """Repeats layers in the graph of ``shorter`` until it is that of ``module``. False, and nothing is changed, where
    the last layers kept are not equal in the graph."""
    graph, path, period = model.graph, shorter.path, shorter.period
    blocks: list[list[ir.Node]] = [[] for _ in range(shorter.kept)]
    for node in graph:
        if (layer := _layer_at(node, path)) is not None:
            blocks[layer].append(node)
    first = [node for block in blocks[-2 * period : -period] for node in block]
    last = [node for block in blocks[-period:] for node in block]
    same = _counterparts(first, last, path, period)
    if same is None or _is_read_elsewhere(graph, blocks, last, path):
        return False
    parameters = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    inputs, outputs = {value.name: value for value in graph.inputs}, {value.name: value for value in graph.outputs}
    own = {value for node in last for value in node.inputs if value is not None and _is_own(value, path)}
    after, now = last[-1], {value: value for node in last for value in node.outputs}
    behind = [use for value in now for use in value.uses() if use.node not in set(last)]
    for start in range(shorter.kept, shorter.layers, period):
        moved = start - shorter.kept + period
        # What a layer has of its own, then what it reads of the one before.
        values: dict[ir.Value, ir.Value] = {}
        for value in own:
            name = _moved(value.name or "", path, moved)
            if value.is_initializer():
                if name not in graph.initializers:
                    graph.register_initializer(_initializer(name, parameters[name]))
                values[value] = graph.initializers[name]
            else:
                values[value] = inputs.setdefault(name, ir.Value(name=name, shape=value.shape, type=value.type))
        values |= {one: now[other] for one, other in same.items()}
        copies = {}
        for node in last:
            copied = _copy(node, values, path, moved)
            graph.insert_after(after, copied)
            after = copied
            for value, made in zip(node.outputs, copied.outputs, strict=True):
                values[value] = copies[value] = made
                if (number := _layer_of(value.name or "")) >= 0:
                    outputs[_renumbered(value.name or "", number + moved)] = made
        now = copies
    for use in behind:
        use.node.replace_input_with(use.idx, now[use.node.inputs[use.idx]])
    for value, replaced in now.items():
        if value.is_graph_output() and _layer_of(value.name or "") < 0:
            outputs[value.name or ""] = replaced
    for values_of, specs, known in ((graph.inputs, interface.inputs, inputs), (graph.outputs, interface.outputs, outputs)):
        values_of[:] = [known[spec.name] for spec in specs]
    return True


def _layer_at(node: ir.Node, path: str) -> int | None:
    """The layer at ``path`` in which ``node`` is."""
    found = re.search(rf"'{re.escape(path)}\.(\d+)'", node.metadata_props.get(NAME_SCOPES, ""))
    return int(found[1]) if found else None


def _moved(name: str, path: str, by: int) -> str:
    """``name`` of a layer that lies ``by`` further."""
    if (layer := _layer_of(name)) >= 0:
        return _renumbered(name, layer + by)
    return re.sub(rf"^({re.escape(path)}\.)(\d+)", lambda found: f"{found[1]}{int(found[2]) + by}", name)


def _is_own(value: ir.Value, path: str) -> bool:
    """Whether ``value`` is a parameter or an input that each layer has of its own."""
    outside = value.producer() is None
    return outside and _moved(value.name or "", path, 1) != value.name


def _counterparts(
    first: list[ir.Node], last: list[ir.Node], path: str, period: int
) -> dict[ir.Value, ir.Value] | None:
    """Values that the ``first`` of two equal pieces of a graph makes, and those that the ``last`` makes; None where they
    differ."""
    same: dict[ir.Value, ir.Value] = {}
    made = {value for node in first for value in node.outputs}
    for one, other in zip(first, last, strict=False):
        if _kind(one) != _kind(other):
            return None
        for a, b in zip(one.inputs, other.inputs, strict=True):
            is_same = a is b or (a in made and same.get(a) is b)
            is_own = a is not None and b is not None and a.producer() is None and _moved(a.name or "", path, period) == b.name
            is_chain = b in made and a not in made
            if not (is_same or is_own or is_chain):
                return None
        same |= zip(one.outputs, other.outputs, strict=True)
    return same if len(first) == len(last) else None


def _kind(node: ir.Node) -> tuple[object, ...]:
    """What ``node`` does with its inputs."""
    attributes = {
        name: (each.type, each.value.tobytes() if isinstance(each.value, ir.TensorProtocol) else each.value)
        for name, each in node.attributes.items()
    }
    return node.domain, node.op_type, node.overload, attributes, len(node.inputs), len(node.outputs)


def _is_read_elsewhere(graph: ir.Graph, layers: list[list[ir.Node]], last: list[ir.Node], path: str) -> bool:
    """Whether a node outside all layers reads what one before the ``last`` makes of its parameters: constants that one
    layer makes are read by all."""
    inside, varying = {node for layer in layers for node in layer}, set[ir.Value | None]()
    for node in graph:
        if node in inside and any(value in varying or (value and _is_own(value, path)) for value in node.inputs):
            varying.update(node.outputs)
    varying.difference_update(value for node in last for value in node.outputs)
    return any(value in varying for node in graph if node not in inside for value in node.inputs)


def _initializer(name: str, tensor: torch.Tensor) -> ir.Value:
    constant = tensor_adapters.TorchTensor(tensor, name=name)
    return ir.Value(name=name, shape=constant.shape, type=ir.TensorType(constant.dtype), const_value=constant)


def _copy(node: ir.Node, values: Mapping[ir.Value, ir.Value], path: str, moved: int) -> ir.Node:
    """``node`` of the layer that lies ``moved`` further, on ``values`` in place of its own inputs."""
    outputs = []
    for value in node.outputs:
        number = _layer_of(value.name or "")
        name = _renumbered(value.name or "", number + moved) if number >= 0 else f"{value.name}_{moved}"
        outputs.append(ir.Value(name=name, shape=value.shape, type=value.type))
    inputs = [value if value is None else values.get(value, value) for value in node.inputs]
    scopes = node.metadata_props.get(NAME_SCOPES, "")
    at = rf"'({re.escape(path)}\.)(\d+)"
    return ir.Node(
        node.domain,
        node.op_type,
        inputs,
        node.attributes.values(),
        overload=node.overload,
        outputs=outputs,
        version=node.version,
        name=f"{node.name}_{moved}",
        metadata_props={
            **node.metadata_props,
            NAME_SCOPES: re.sub(at, lambda found: f"'{found[1]}{int(found[2]) + moved}", scopes),
        },
    )
