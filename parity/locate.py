"""Where an export goes wrong: the first module whose value it does not have, and in words what kind of fault that is.

Every module of the model is watched, what goes in and what comes out, in the order in which they run; a value counts as
there where the export computes the same numbers under whatever name, so that graphs without names, rewritten or fused
ones are searched alike. A fused value is in no graph: where a later value that depends on it is right, so was it. The
first value that is missing, that no later one which is there depends on and that the wrong output does depend on, is
where the fault lies. What it is is found by trial: the model is changed as the known faults change it
(``explanations.py``), and the one that computes the export's numbers is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..compiler.parity.compare import rounding
from ..runtime.inputs.arrays import Array
from .cases import Trial
from .events import Event, Recorder
from .explanations import explain, kind_of_cases
from .export import Export, module_of
from .found import Found
from .match import Match
from .model import Model
from .verdict import Rule, same, simulated
from .weights import Lost, audit

_NODE = re.compile(r"Name:'([^']*)'")
_MOVED = 1e-4  # of its size: what a value has to change by to depend on another
_MOST_PASSES = 60


@dataclass(frozen=True)
class Fault:
    """``module`` of the model where an export goes wrong, its ``side`` (``in`` or ``out``), the export's ``node`` and
    ``operator`` there, the value ``expected`` and ``got`` at the worst place, and the ``kind`` of fault in words."""

    module: str
    kind: str
    side: str = "out"
    node: str = ""
    operator: str = ""
    expected: float | None = None
    got: float | None = None
    errors: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        at = f" (node {self.node}, {self.operator})" if self.node else ""
        values = "" if self.expected is None else f", expected {self.expected:.6g}, got {self.got:.6g}"
        return f"first wrong: {self.module}{at}{values}; it looks like {self.kind}"


def locate(
    export: Export,
    model: Model,
    rule: Rule,
    inputs: Sequence[Match],
    outputs: Sequence[Match],
    trials: Sequence[Trial],
    wrong: frozenset[str],
    failures: Sequence[Any],
) -> Fault:
    """The fault of an export whose answers are ``wrong`` in these cases, or ``failures``."""
    by_cases = kind_of_cases(trials, wrong)
    failed = {failure.case for failure in failures}
    if failed and failed >= set(wrong):
        return _of_failure(export, model, failures[0].said, by_cases)
    trial = min((t for t in trials if t.name in wrong - failed), key=lambda t: (t.tokens < 4, t.tokens))
    by_weights = audit(export, model)
    search = Search(export, model, rule, inputs, outputs, trial)
    if trial.pieces and search.is_right_at_once:
        return Fault("the cache", "a cache that is read or written at another place")
    return search.fault(by_cases, by_weights)


def _of_failure(export: Export, model: Model, said: str, by_cases: str | None) -> Fault:
    found = _NODE.search(said)
    node = next((n for n in _nodes(export) if found and n.name == found[1]), None)
    left = ((module_of(node) if node is not None else None) or "").split(".")
    shorter = (".".join(left[place:]) for place in range(len(left)))  # the exporter's own wrapper stands before it
    module = next((name for name in shorter if name and model.part(name) is not None), "the graph")
    kind = by_cases or "sizes that are frozen in the graph"
    return Fault(module, kind, node=found[1] if found else "", operator=node.op_type if node is not None else "")


def _nodes(export: Export) -> Sequence[Any]:
    graph = getattr(export, "graph", None)
    return graph.graph.node if graph is not None else ()


class Search(Found):
    """The search on one wrong case."""

    @property
    def is_right_at_once(self) -> bool:
        """Whether a decoder answers the whole sequence rightly without a cache."""
        passed = self.model.answer(self.trial.feeds)
        with self.model.wide() as wide:
            expected = wide(self.trial.feeds)
        pairs = [(self.counted(expected[name]), self.counted(passed[name]), got) for name, got in self.answers.items()]
        return all(same(wanted, got, self.rule, rounding(wanted, own)) for wanted, own, got in pairs)

    def fault(self, by_cases: str | None, by_weights: Lost | None) -> Fault:
        recorder = Recorder(self.model)
        with self.model.wide() as wide:
            expected = recorder.watch_wide(wide, self.trial.feeds)
        if self.rule.simulates:
            with simulated(self.rule.precision):
                passed, _ = recorder.watch(self.trial.feeds)
        else:
            passed, _ = recorder.watch(self.trial.feeds)
        errors: dict[Event, float] = {}
        there: dict[Event, bool] = {}
        claimed: set[str] = set()
        for event, array in expected.items():
            if event not in passed or passed[event].shape != array.shape:
                continue
            wanted = self.counted(array)
            own = rounding(wanted, self.counted(passed[event])).of_all
            found = self.nearest(wanted)
            errors[event] = np.inf if found is None else _relative(wanted, found[1])
            there[event] = found is not None and same(wanted, found[1], self.rule, own)
            if found is not None and there[event]:
                claimed.add(found[0].name)
        first = self._first(recorder, there)
        shown = tuple((str(each), float(error)) for each, error in errors.items() if each.side == "out")
        if first is None:
            kind = by_weights.words if by_weights else by_cases
            module = by_weights.module if by_weights else "behind the last module"
            return Fault(module, kind or "another function of the right values", errors=shown)
        event = first
        module = event.module if event.side == "out" else event.parent
        kind = by_weights.words if by_weights else None
        if kind is None or "checkpoint" not in kind:
            tried = explain(self, recorder, event, expected[event], claimed, by_weights)
            module, kind = tried or (module, kind)
        node, values = self._node(event, expected[event])
        kind = kind or by_cases or _by_type(self.model, module)
        return Fault(stage_of(module), kind, event.side, *node, *values, errors=shown)

    def _first(self, recorder: Recorder, there: Mapping[Event, bool]) -> Event | None:
        """The first missing value that matters and that no value which is there depends on."""
        wrong = [match.model for match in self.outputs]
        before, answers = recorder.watch(self.trial.feeds)
        tried = 0
        for place, event in enumerate(there):
            if there[event]:
                continue
            tried += 1
            if tried > _MOST_PASSES:
                return event
            moved, moved_answers = recorder.watch(self.trial.feeds, nudge=event)
            later = list(there)[place + 1 :]
            if any(there[each] and _differs(before[each], moved.get(each)) for each in later if each in moved):
                continue
            if any(_differs(answers[name], moved_answers.get(name)) for name in wrong):
                return event
        return None

    def _node(self, event: Event, expected: Array) -> tuple[tuple[str, str], tuple[float | None, float | None]]:
        """The export's node at ``event``, by the name that the exporter left, else by the nearest value; and what was
        expected and got at the worst place."""
        wanted = self.counted(expected)
        module = event.module if event.side == "out" else event.parent
        named = [v for v in self.values if v.array.size == wanted.size and v.module and v.module.endswith(module)]
        found = named[-1] if named else (near[0] if (near := self.nearest(wanted)) else None)
        if found is None:
            return ("", ""), (None, None)
        got = self.counted(found.array.reshape(wanted.shape))
        worst = np.unravel_index(int(np.abs(got - wanted).argmax()), wanted.shape)
        return (found.node, found.operator), (float(wanted[worst]), float(got[worst]))


def _relative(wanted: Array, found: Array) -> float:
    size = float(np.sqrt(np.mean(np.square(wanted, dtype=np.float64)))) if wanted.size else 0.0
    return float(np.sqrt(np.mean(np.square(found - wanted, dtype=np.float64)))) / max(size, 1e-12)


def _differs(before: Array, after: Array | None) -> bool:
    if after is None or before.shape != after.shape:
        return True
    size = float(np.abs(before).max(initial=0.0))
    return bool(np.abs(after - before).max(initial=0.0) > _MOVED * max(size, 1e-12))


def stage_of(module: str) -> str:
    """A module behind a sentence-transformers model by its place, without what it is made of."""
    return ".".join(module.split(".")[:2]) if module.startswith("sentence_head.") else module


def _by_type(model: Model, module: str) -> str:
    part = model.part(module)
    if part is not None and any(
        own is other
        for own in part.parameters(recurse=False)
        for path, each in model.module.named_modules()
        if each is not part
        for other in each.parameters(recurse=False)
    ):
        return "a tied table that is untied, or a tied weight that is not the model's"
    return f"another computation of this {'module' if part is None else type(part).__name__}"
