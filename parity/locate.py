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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..compiler.parity.compare import rounding
from ..runtime.inputs.arrays import Array
from .cases import Trial
from .explanations import explain, kind_of_cases
from .match import Match
from .model import Model
from .steps import Pair, continues_alone
from .values import Event, Found, values_of
from .verdict import Rule
from .weights import Lost, audit

_NODE = re.compile(r"Name:'([^']*)'")
_MOVED = 1e-4  # of its size: what a value has to change by to depend on another
_MOST_PASSES = 60
_SHORT = 4  # tokens: shorter texts may hide a fault by chance


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
    pair: Pair,
    rule: Rule,
    outputs: Sequence[Match],
    trials: Sequence[Trial],
    wrong: Collection[str],
    failed: Mapping[str, str],
) -> Fault:
    """The fault of an export whose answers are ``wrong`` in these cases; some ``failed`` with what was said."""
    by_cases = kind_of_cases(trials, wrong)
    if failed and failed.keys() >= set(wrong):
        return _of_failure(pair, next(iter(failed.values())), by_cases)
    left = [trial for trial in trials if trial.name in wrong and trial.name not in failed]
    trial = min(left, key=lambda trial: (trial.tokens < _SHORT, trial.tokens))
    expected, answers = values_of(pair.model, lambda: pair.model.wide_answer(trial.feeds))
    lost = audit(pair.export, pair.model, {event.module for event in expected})
    if continues_alone(pair.export):  # none of its steps is a pass of the model
        words = lost.words if lost else "steps that differ behind a right prompt"
        return Fault(lost.module if lost else "the graph", words)
    search = Found(pair, rule, outputs, trial, {array.size for array in (*expected.values(), *answers.values())})
    if trial.pieces and _is_right_at_once(search, answers):
        return Fault("the cache", "a cache that is read or written at another place")
    return _fault(search, expected, by_cases, lost)


def _of_failure(pair: Pair, said: str, by_cases: str | None) -> Fault:
    node = found[1] if (found := _NODE.search(said)) else ""
    path, operator = pair.export.module_of(node)
    left = (path or "").split(".")
    shorter = (".".join(left[place:]) for place in range(len(left)))  # the exporter's own wrapper stands before it
    module = next((name for name in shorter if name and pair.model.part(name) is not None), "the graph")
    return Fault(module, by_cases or "sizes that are frozen in the graph", node=node, operator=operator)


def _is_right_at_once(search: Found, expected: Mapping[str, Array]) -> bool:
    """Whether a decoder answers the whole sequence rightly without a cache."""
    trial, passed = search.trial, search.model.answer(search.trial.feeds)
    wanted = {name: trial.counted(expected[name], name) for name in search.answers}
    owns = {name: rounding(wanted[name], trial.counted(passed[name], name)) for name in search.answers}
    return all(search.rule.same(wanted[name], got, owns[name]) for name, got in search.answers.items())


def _fault(search: Found, expected: Mapping[Event, Array], by_cases: str | None, by_weights: Lost | None) -> Fault:
    passed, _ = values_of(search.model, lambda: search.rule.passed(search.model, search.trial))
    errors: dict[Event, float] = {}
    there: dict[Event, bool] = {}
    claimed: set[str] = set()
    for event, array in expected.items():
        if event not in passed or passed[event].shape != array.shape:
            continue
        wanted, own = (search.trial.counted(each, event.module) for each in (array, passed[event]))
        found = search.nearest(wanted, event.module)
        errors[event] = np.inf if found is None else _relative(wanted, found[1])
        there[event] = found is not None and search.rule.same(wanted, found[1], rounding(wanted, own))
        if found is not None and there[event]:
            claimed.add(found[0].name)
    first = _first(search, there)
    shown = tuple((str(each), float(error)) for each, error in errors.items() if each.side == "out")
    kind = by_weights.words if by_weights else None
    if first is None:
        module = by_weights.module if by_weights else "behind the last module"
        return Fault(module, kind or by_cases or "another function of the right values", errors=shown)
    module = first.owner
    if kind is None or "checkpoint" not in kind:
        tried = explain(search, first, expected[first], claimed, by_weights)
        module, kind = tried or (module, kind)
    node, values = _node(search, first, expected[first])
    kind = kind or by_cases or _by_type(search.model, module)
    return Fault(stage_of(module), kind, first.side, *node, *values, errors=shown)


def _first(search: Found, there: Mapping[Event, bool]) -> Event | None:
    """The first missing value that matters and that no value which is there depends on."""
    model, answer = search.model, lambda: search.model.answer(search.trial.feeds)
    before, answers = values_of(model, answer, only={event for event, is_there in there.items() if is_there})
    missing = [event for event, is_there in there.items() if not is_there]
    order = list(there)
    for event in missing[:_MOST_PASSES]:
        later = [each for each in order[order.index(event) + 1 :] if there[each]]
        moved, moved_answers = values_of(model, answer, event, set(later))
        if any(_differs(before[each], moved[each]) for each in later if each in moved):
            continue
        if any(_differs(answers[name], moved_answers.get(name)) for name in search.answers):
            return event
    return missing[_MOST_PASSES] if len(missing) > _MOST_PASSES else None


def _node(search: Found, event: Event, expected: Array) -> tuple[tuple[str, str], tuple[float | None, float | None]]:
    """The export's node at ``event``, by the name that the exporter left, else by the nearest value; and what was
    expected and got at the worst place."""
    wanted = search.trial.counted(expected, event.module)
    named = [v for v in search.values if v.array.size == wanted.size and v.module and v.module.endswith(event.owner)]
    found = named[-1] if named else (near[0] if (near := search.nearest(wanted, event.module)) else None)
    if found is None:
        return ("", ""), (None, None)
    got = search.trial.counted(found.array.reshape(wanted.shape), event.module)
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
