"""A model with few of its equal layers, to be traced in its place: what torch.export takes grows with their number.

Layers are equal where passes on tensors without numbers call
the same operations on the same places: on parameters of their own under the same names, on what the layer before left,
and on what lies outside all layers. A model with the first layers alone is passed too, and must be the whole one but
for layers that repeat (repeated_layers.py).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch

from ..bundle.entries.generation_entry import PAST, PRESENT
from ..bundle.entries.tensor_spec import TensorSpec
from .faster_export import compiling_state
from .signature import Interface
from .torch_internals import FakeTensorMode, TorchDispatchMode, disable_current_modes, tree_flatten

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
    stays = [layer_of(spec.name) < kept for spec in interface.inputs]
    found = Shorter(
        _with_first(module, path, kept),
        tuple(compress(interface.inputs, stays)),
        tuple(spec for spec in interface.outputs if layer_of(spec.name) < kept),
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


def layer_of(name: str | None) -> int:
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
        origins = {name: self.outputs.get(renumbered(name, layer_of(name) - period)) for name in self.outputs}
        return (
            (few.before, few.behind, few.layers) == (self.before, self.behind, self.layers[:kept])
            and all(self.layers[i] == self.layers[i - period] for i in range(kept, len(self.layers)))
            and few.outputs == {name: place for name, place in self.outputs.items() if layer_of(name) < kept}
            and all(self.outputs[name] == origins[name] for name in origins if layer_of(name) >= kept)
        )


def renumbered(name: str, layer: int) -> str:
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
        with disable_current_modes():  # numbers that stand in the code
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
        layer = layer_of(spec.name)
        known[id(tensor)] = (layer if layer >= 0 else None, ("input", renumbered(spec.name, 0)))
    log, stack = _Log(known), module.get_submodule(path)
    assert isinstance(stack, torch.nn.ModuleList)
    for place, each in enumerate(stack):
        each.register_forward_pre_hook(partial(log.enter, place))
        each.register_forward_hook(log.leave)
    with fake, torch.no_grad(), compiling_state(), log:
        outputs = module(*inputs)
    if len(log.found.layers) != len(stack):
        return None
    for spec, tensor in zip(interface.outputs, outputs, strict=True):
        layer = layer_of(spec.name)
        log.found.outputs[spec.name] = log.place(tensor, layer if layer >= 0 else len(stack))
    return log.found
