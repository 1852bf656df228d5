"""Values inside, of both sides: what goes in and comes out of every module of a model, in the order in which they run;
which of an export's values comes nearest to each; and which depend on which."""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import Node, saved_tensors_hooks

from ..compiler.parity.compare import rounding
from ..compiler.parity.engine_verdict import watched
from ..errors import InputError
from ..runtime.inputs.arrays import Array, Arrays
from .cases import Trial
from .export import Value
from .model import WRAPPER, Model
from .steps import Pair
from .verdict import Rule

# Numbers of a model's values that are held at once.
_MOST_NUMBERS = 2**21


@dataclass(frozen=True)
class Event:
    """One value that goes ``in`` or comes ``out`` of ``module`` the ``nth`` time that it runs."""

    module: str
    side: str
    nth: int = 0

    @property
    def owner(self) -> str:
        """The module whose own computation made it: of what goes in the one around."""
        return self.module if self.side == "out" else self.module.rpartition(".")[0] or self.module

    def is_within(self, scope: str) -> bool:
        return f"{self.module}.".startswith(f"{scope}." if scope else "")

    def __str__(self) -> str:
        return self.module if self.side == "out" else f"before {self.module}"


Kept = Callable[[Event, torch.Tensor], torch.Tensor | None]


def pass_of(model: Model, run: Callable[[], dict[str, Any]], kept: Kept) -> dict[str, Any]:
    """Outputs of ``run``, a pass of the model, with ``kept`` given the values of every event."""
    counts: dict[tuple[str, str], int] = {}

    def seen(path: str, side: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if path == WRAPPER[:-1]:
            return None
        nth = counts[path, side] = counts.get((path, side), -1) + 1
        return kept(Event(path.removeprefix(WRAPPER), side, nth), tensor)

    with watched(model.module, seen):
        return run()


def values_of(
    model: Model, run: Callable[[], dict[str, Array]], only: Collection[Event]
) -> tuple[dict[Event, Array], dict[str, Array]]:
    """The values of the events in ``only`` in ``run``, a pass of the model, in their order, and what it returns."""
    found: dict[Event, Array] = {}

    def keep(event: Event, tensor: torch.Tensor) -> None:
        if event in only:
            found[event] = tensor.detach().numpy().copy()

    return found, pass_of(model, run, keep)


class Dependence:
    """Which values a pass of the model computed from which, by PyTorch's autograd: the ``sizes`` of those that the
    ``outputs`` depend on, in numbers. Where autograd cannot follow the model's own code, or no output (whole numbers),
    all of them, in their order alone."""

    def __init__(self, model: Model, trial: Trial, outputs: Collection[str]) -> None:
        self._nodes: dict[Event, Node] = {}
        self.sizes: dict[Event, int] = {}
        nothing: Any = lambda _: None  # noqa: E731  (no value is kept for it)
        try:
            with torch.enable_grad(), saved_tensors_hooks(nothing, nothing):
                found = pass_of(model, lambda: model.tensors(trial.feeds), self._mark)
        except Exception:  # noqa: BLE001  (a model's own code may do what autograd refuses)
            self._nodes.clear()
            self.sizes.clear()
            pass_of(model, lambda: model.tensors(trial.feeds), self._note)
            return
        if ends := {node for name in outputs if (node := found[name].grad_fn) is not None}:
            matter: set[Node | None] = {None, *_behind(ends), *ends}
            self.sizes = {event: size for event, size in self.sizes.items() if self._nodes.get(event) in matter}

    def _note(self, event: Event, tensor: torch.Tensor) -> None:
        self.sizes[event] = tensor.numel()

    def _mark(self, event: Event, tensor: torch.Tensor) -> torch.Tensor:
        self._note(event, tensor)
        marked = tensor if tensor.grad_fn is not None else tensor.detach().clone().requires_grad_() * 1
        if marked.grad_fn is None:  # the model's own code is without autograd here
            return tensor
        self._nodes[event] = marked.grad_fn
        return marked

    def first(self, there: Mapping[Event, bool]) -> Event | None:
        """The first event that is not ``there``, and that none which is depends on."""
        nodes = (self._nodes.get(event) for event, is_there in there.items() if is_there)
        right = _behind(node for node in nodes if node is not None)
        return next((e for e, is_there in there.items() if not is_there and self._nodes.get(e) not in right), None)


def _behind(nodes: Iterable[Node]) -> set[Node]:
    """All that ``nodes`` were computed from."""
    todo = [before for node in nodes for before, _ in node.next_functions]
    found: set[Node] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [before for before, _ in node.next_functions]
    return found


@dataclass
class Search:
    """An export's values beside the model's on one wrong case; ``answers`` are the export's, by the model's names.

    Few values of either side are held at once: of a long case those of as many levels of modules as have room, and
    then those inside of the one that is wrong.
    """

    pair: Pair
    rule: Rule
    trial: Trial
    answers: Arrays
    errors: dict[Event, float] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)  # names of values that are right ones
    candidates: list[Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = model = self.pair.model
        self.depends = Dependence(model, self.trial, self.answers.keys())
        self.sizes = self.depends.sizes

    def first_wrong(self) -> Event | None:
        """The first value that matters, that the export does not have and that none which it has depends on."""
        scope = ""
        while True:
            events = self._fitting(scope)
            there = self._compared(events)
            first = self.depends.first(there)
            inner = () if first is None else [e for e in self.sizes if e.is_within(first.module) and e not in there]
            if first is None or first.side == "in" or first.module == scope or not inner:
                return first
            scope = first.module

    def _fitting(self, scope: str) -> list[Event]:
        """Events within ``scope``, of as many levels of modules as there is room for, of one inside at least."""
        within = [event for event in self.sizes if event.is_within(scope)]
        some = within
        for most in sorted({event.module.count(".") for event in within if event.module != scope}, reverse=True):
            some = [event for event in within if event.module.count(".") <= most]
            if sum(self.sizes[event] for event in some) <= _MOST_NUMBERS:
                break
        return some

    def _compared(self, events: Collection[Event]) -> dict[Event, bool]:
        """Whether the export has the values of these events; those that both passes have."""
        trial, model = self.trial, self.model
        exact, _ = values_of(model, lambda: model.wide_answer(trial.feeds), events)
        passed, _ = values_of(model, lambda: self.rule.passed(model, trial), events)
        wanted: dict[Event, Array] = {}
        alike: dict[tuple[tuple[int, ...], bool], list[tuple[Event, Array]]] = {}
        for event in list(exact):
            array = exact.pop(event)
            if event in passed and passed[event].shape == array.shape:
                wanted[event] = trial.counted(array, event.module)
                key = array.shape, trial.hides(event.module)
                alike.setdefault(key, []).append((event, wanted[event].astype(np.float32)))
        best: dict[Event, tuple[float, str, Array]] = {}
        for value in self._values({array.size for array in wanted.values()}):
            for (shape, _), group in alike.items():
                if value.array.size != np.prod(shape, dtype=int):
                    continue
                laid = self.laid(value, group[0][1], group[0][0].module)
                for event, array in group:
                    off = float(np.linalg.norm((laid - array).reshape(-1)))
                    if event not in best or off < best[event][0]:
                        best[event] = off, value.name, laid
        there = {}
        for event, array in wanted.items():
            _, name, got = best.get(event, (0.0, "", None))
            own = rounding(array, trial.counted(passed[event], event.module))
            there[event] = got is not None and self.rule.same(array, got, own)
            self.errors[event] = np.inf if got is None else rms(got - array) / max(rms(array), 1e-12)
            self.claimed |= {name} if there[event] else set()
        return there

    def _values(self, sizes: Collection[int]) -> Iterator[Value]:
        feeds = self.pair.feeds(self.trial)
        given = (Value(name, name, "input", None, array) for name, array in feeds.items() if array.dtype.kind == "f")
        shown = chain(given, self.pair.export.values(feeds, sizes))
        try:
            yield from (value for value in shown if value.array.size in sizes and np.isfinite(value.array).all())
        except InputError:  # a graph that runs as a whole alone
            return

    def laid(self, value: Value, like: Array, module: str) -> Array:
        """The numbers of ``value`` as those of a ``module`` in the shape of ``like``."""
        return self.trial.counted(value.array.reshape(like.shape), module).astype(np.float32, copy=False)

    def collect(self, wanted: Array, module: str) -> None:
        """Holds the export's values that may be ``wanted``, the nearest ones where there are too many."""
        most, size = max(1, _MOST_NUMBERS // max(1, wanted.size)), {wanted.size} if wanted.size else set()
        near = lambda value: rms(self.laid(value, wanted, module) - wanted)  # noqa: E731
        self.candidates = heapq.nsmallest(most, self._values(size), near)

    def nearest(self, wanted: Array, module: str) -> Array | None:
        """The value held that comes nearest to ``wanted``, of a ``module``, and is not another's."""
        free = (self.laid(value, wanted, module) for value in self.candidates if value.name not in self.claimed)
        return min(free, key=lambda array: rms(array - wanted), default=None)


def rms(array: Any) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0
