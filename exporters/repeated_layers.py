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
from functools import partial
from itertools import chain, compress
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import _trace as export_trace
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from ..bundle.entries.generation_entry import PAST, PRESENT
from ..bundle.entries.tensor_spec import TensorSpec
from .signature import Interface

NAME_SCOPES = "pkg.torch.onnx.name_scopes"
_NUMBERED = re.compile(rf"((?:{PAST}|{PRESENT})\w+_)(\d{{1,6}})")
_PERIODS = range(1, 7)
# Fewer are traced as they are: two passes cost what some layers do.
_LEAST_LEFT_OUT = 4
_MOST_NUMBERS = 64


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


def shortened(
    module: torch.nn.Module, interface: Interface, example: tuple[torch.Tensor, ...], *others: tuple[torch.Tensor, ...]
) -> Shorter | None:
    """``module`` with fewer layers, where the others are proven to repeat those kept; None elsewhere. Layers must be
    equal at the sizes of ``others`` too: what they make of a size may be the same at one alone."""
    stacks = {
        name: stack
        for name, stack in module.named_modules()
        if isinstance(stack, torch.nn.ModuleList) and len({type(layer) for layer in stack}) == 1
    }
    path = max(stacks, key=lambda name: len(stacks[name]), default="")
    layers = len(stacks.get(path, ()))
    if layers < _LEAST_LEFT_OUT + 2:
        return None
    whole = _read(module, path, layers, interface, example)
    kept, period = min((whole.needed(period), period) for period in _PERIODS) if whole is not None else (layers, 1)
    if whole is None or layers - kept < _LEAST_LEFT_OUT:
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
    for at in (example, *others):
        every = whole if at is example else _read(module, path, layers, interface, at)
        few = _read(module, path, kept, found, tuple(compress(at, stays)))
        if every is None or few is None or not every.repeats(few, period):
            return None
    return found


def _with_first(module: torch.nn.Module, path: str, kept: int) -> torch.nn.Module:
    """A copy of ``module`` on the same tensors, with the first ``kept`` layers at ``path``. Raises whatever a class
    does that cannot be copied."""
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    found = copy.deepcopy(module, memo)
    if not {*found.modules()}.isdisjoint(module.modules()):
        raise _NotInTurnError  # a class whose copy is itself
    owner, _, name = path.rpartition(".")
    layers = found.get_submodule(path)
    assert isinstance(layers, torch.nn.ModuleList)
    own = vars(found).get("layers")
    if isinstance(own, (list, tuple)) and len(own) == len(layers):  # what a cache keeps of each
        vars(found)["layers"] = own[:kept]
    setattr(found.get_submodule(owner), name, layers[:kept])
    return found


def _layer_of(name: str | None) -> int:
    """The layer of which ``name`` is a tensor of a cache, -1 for other names."""
    found = _NUMBERED.fullmatch(name or "")
    return int(found[2]) if found else -1


_Step = tuple[Any, ...]


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
        origins = {name: self.outputs.get(_renumbered(name, _layer_of(name) - period)) for name in self.outputs}
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
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.layer = _Reading(), -1
        self._known, self._inside = dict(known), False
        self._given: tuple[Any, ...] = ()
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
        if id(tensor) in self._known:
            layer, what = self._known[id(tensor)]
            return _Place(None if layer is None else reader - layer, what)
        if type(tensor) is not torch.Tensor or tensor.numel() > _MOST_NUMBERS:
            raise _NotInTurnError
        with _disable_current_modes():  # numbers that stand in the code
            return _Place(None, ("numbers", tensor.dtype, tuple(tensor.shape), str(tensor.tolist())))

    def enter(self, layer: int, _: object, given: tuple[Any, ...]) -> None:
        if self._inside or layer != self.layer + 1 or self.found.behind:
            raise _NotInTurnError
        self.layer, self._inside = layer, True
        self.found.layers.append([])
        self._given = given

    def leave(self, _: object, __: object, returned: Any) -> None:
        self._inside = False
        made = returned[0] if isinstance(returned, tuple) else returned
        if self.layer == 0 and self._given and isinstance(made, torch.Tensor):
            # The first layer reads what comes in as the others read the layer before.
            own, like = self.place(self._given[0], 0), self.place(made, 1)
            self.found.layers[0] = [
                (func, form, tuple(like if each == own else each for each in read), sizes)
                for func, form, read, sizes in self.found.layers[0]
            ]


def _read(
    original: torch.nn.Module, path: str, kept: int, interface: Interface, example: tuple[torch.Tensor, ...]
) -> _Reading | None:
    """The steps of ``original`` with the first ``kept`` layers at ``path``, at the sizes of ``example``; None where it
    has no copy, layers are not called in turn, or a pass needs numbers."""
    try:
        return _steps(_with_first(original, path, kept), path, interface, example)
    except Exception:  # noqa: BLE001  (of any kind: the export of all layers says what a class cannot do)
        return None


def _steps(
    module: torch.nn.Module, path: str, interface: Interface, example: tuple[torch.Tensor, ...]
) -> _Reading | None:
    known: dict[int, tuple[int | None, _Step]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        number, _, own = name.removeprefix(f"{path}.").partition(".")
        inside = name.startswith(f"{path}.")
        known.setdefault(id(tensor), (int(number) if inside else None, ("own", own if inside else name)))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        inputs = [torch.ones(tensor.shape, dtype=tensor.dtype) for tensor in example]
    for spec, tensor in zip(interface.inputs, inputs, strict=True):
        layer = _layer_of(spec.name)
        known[id(tensor)] = (layer if layer >= 0 else None, ("input", _renumbered(spec.name, 0)))
    log, stack = _Log(known), module.get_submodule(path)
    assert isinstance(stack, torch.nn.ModuleList)
    for place, each in enumerate(stack):
        each.register_forward_pre_hook(partial(log.enter, place))
        each.register_forward_hook(log.leave)
    with fake, torch.no_grad(), export_trace._compiling_state_context(), log:  # type: ignore[attr-defined]
        outputs = module(*inputs)
    if len(log.found.layers) != len(stack):
        return None
    for spec, tensor in zip(interface.outputs, outputs, strict=True):
        layer = _layer_of(spec.name)
        log.found.outputs[spec.name] = log.place(tensor, layer if layer >= 0 else len(stack))
    return log.found


def repeat_layers(model: ir.Model, shorter: Shorter, module: torch.nn.Module, interface: Interface) -> bool:
    """Repeats layers in the graph of ``shorter`` until it is that of ``module``. False, and the graph is of no use,
    where the last layers kept are not equal in it, or what is outside them reads what a layer has of its own."""
    graph, path, period = model.graph, shorter.path, shorter.period
    layers: list[list[ir.Node]] = [[] for _ in range(shorter.kept)]
    static = _static_values(graph)
    for node in graph:
        if (layer := _layer_at(node, path)) is not None and node.outputs[0] not in static:
            layers[layer].append(node)
    first, last = list(chain(*layers[-2 * period : -period])), list(chain(*layers[-period:]))
    same, others = _counterparts(first, last, path, period, static), chain(*layers[:-period])
    inside, hidden = set(chain(*layers)), {value for node in others for value in node.outputs}
    read = [(node, value) for node in graph if node not in inside for value in node.inputs if value is not None]
    if (
        same is None
        or not last
        or any(value in hidden for _, value in read)
        or any(_is_own(value, path) for node, value in read if node.outputs[0] not in static)
        or any(value in hidden for value in graph.outputs if _layer_of(value.name) < 0)
    ):
        return False
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    inputs, outputs = {value.name: value for value in graph.inputs}, {value.name: value for value in graph.outputs}
    made = {value: value for node in last for value in node.outputs}
    behind = [use for value in made for use in value.uses() if use.node not in set(last)]
    end = last[-1]
    for moved in range(period, shorter.layers - shorter.kept + 1, period):
        values = {one: made[other] for one, other in same.items()}  # of the layer before
        for value in {value for node in last for value in node.inputs if value and _is_own(value, path)}:
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
        outputs |= {value.name: value for value in made.values() if _layer_of(value.name) >= 0}
    for use in behind:
        of_kept = use.node.inputs[use.idx]
        use.node.replace_input_with(use.idx, of_kept and made[of_kept])
    for value, repeated in made.items():
        if value.is_graph_output() and _layer_of(value.name) < 0:
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


def _layer_at(node: ir.Node, path: str) -> int | None:
    """The layer at ``path`` in which ``node`` is."""
    found = re.search(rf"'{re.escape(path)}\.(\d+)'", node.metadata_props.get(NAME_SCOPES, ""))
    return int(found[1]) if found else None


def _moved(value: ir.Value, path: str, by: int) -> str | None:
    """The name that ``value``, a parameter, an input or an output of one layer, has in the layer that lies ``by``
    further; None of any other value."""
    name = value.name or ""
    if (layer := _layer_of(name)) >= 0:
        return _renumbered(name, layer + by)
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
        if node.op_type == "Shape" and read is not None and read.shape is not None:
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
    """What the ``first`` of two equal pieces of a graph makes, with what the ``last`` does; None where they differ."""
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
    """What ``node`` does with its inputs."""
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
