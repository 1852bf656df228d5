"""Where an export goes wrong: the first module whose value it does not have, and in words what kind of fault that is.

Every module of the model is watched, what goes in and what comes out, in the order in which they run; a value counts as
there where the export computes the same numbers under whatever name, so that graphs without names, rewritten or fused
ones are searched alike. A fused value is in no graph: where a later value that depends on it is right, so was it. The
first value that is missing, that no later one which is there depends on and that the wrong output does depend on, is
where the fault lies. The kind of fault is found by trial: the model is changed as the known faults change it
(``explanations.py``), and the one that computes the export's numbers is named.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..compiler.parity.compare import rounding
from ..runtime.inputs.arrays import Array, Arrays
from .cases import Trial
from .explanations import explain, kind_of_cases
from .model import Model
from .steps import Pair, continues_alone
from .values import Event, Search, values_of
from .verdict import Rule
from .weights import Lost, audit

_NODE = re.compile(r"Name:'([^']*)'")
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
    trials: Sequence[Trial],
    answered: Mapping[str, Arrays],
    wrong: Collection[str],
    failed: Mapping[str, str],
) -> Fault:
    """The fault of an export whose answers are ``wrong`` in these cases; some ``failed`` with what was said."""
    by_cases = kind_of_cases(trials, wrong)
    if failed and failed.keys() >= set(wrong):
        return _of_failure(pair, next(iter(failed.values())), by_cases)
    left = [trial for trial in trials if trial.name in wrong and trial.name not in failed]
    trial = min(left, key=lambda trial: (trial.tokens < _SHORT, trial.tokens))
    answers = answered[trial.name]
    if trial.pieces and not continues_alone(pair.export):
        at_once = pair.export.run(pair.feeds(trial))
        answers = {model: at_once[name] for model, name in pair.outputs.items()}
    pair.export.rest()
    answers = {name: trial.counted(array, name) for name, array in answers.items()}
    search = Search(pair, rule, trial, answers)
    lost = audit(pair.export, pair.model, {event.module for event in search.sizes})
    if continues_alone(pair.export):  # none of its steps is a pass of the model
        words = lost.words if lost else "steps that differ behind a right prompt"
        return Fault(lost.module if lost else "the graph", words)
    if trial.pieces and _is_right_at_once(search):
        return Fault("the cache", "a cache that is read or written at another place")
    return _fault(search, by_cases, lost)


def _of_failure(pair: Pair, said: str, by_cases: str | None) -> Fault:
    node = found[1] if (found := _NODE.search(said)) else ""
    path, operator = pair.export.module_of(node)
    left = (path or "").split(".")
    shorter = (".".join(left[place:]) for place in range(len(left)))  # the exporter's own wrapper stands before it
    module = next((name for name in shorter if name and pair.model.part(name) is not None), "the graph")
    return Fault(module, by_cases or "sizes that are frozen in the graph", node=node, operator=operator)


def _is_right_at_once(search: Search) -> bool:
    """Whether a decoder answers the whole sequence rightly without a cache."""
    model, trial, rule = search.model, search.trial, search.rule
    exact, passed = (
        {name: trial.counted(side[name], name) for name in search.answers}
        for side in (model.wide_answer(trial.feeds), model.answer(trial.feeds))
    )
    return all(rule.same(exact[name], got, rounding(exact[name], passed[name])) for name, got in search.answers.items())


def _fault(search: Search, by_cases: str | None, by_weights: Lost | None) -> Fault:
    first = search.first_wrong()
    errors = tuple((str(each), float(error)) for each, error in search.errors.items() if each.side == "out")
    kind = by_weights.words if by_weights else None
    if first is None:
        module = by_weights.module if by_weights else "behind the last module"
        return Fault(module, kind or by_cases or "another function of the right values", errors=errors)
    model, trial, module = search.model, search.trial, first.owner
    exact, _ = values_of(model, lambda: model.wide_answer(trial.feeds), {first})
    wanted = trial.counted(exact[first], first.module)
    search.collect(wanted, first.module)
    if kind is None or "checkpoint" not in kind:
        module, kind = explain(search, first, wanted, by_weights) or (module, kind)
    node, values = _node(search, first, wanted)
    kind = kind or by_cases or _by_type(model, module)
    return Fault(stage_of(module), kind, first.side, *node, *values, errors=errors)


def _node(search: Search, event: Event, wanted: Array) -> tuple[tuple[str, str], tuple[float | None, float | None]]:
    """The export's node at ``event``, by the name that the exporter left, else by the nearest value; and what was
    expected and got at the worst place."""
    named = [value for value in search.candidates if value.module and value.module.endswith(event.owner)]
    near = [value for value in search.candidates if value.name not in search.claimed]
    if not (found := named[-1:] or near[:1]):
        return ("", ""), (None, None)
    got = search.laid(found[0], wanted, event.module)
    worst = np.unravel_index(int(np.abs(got - wanted).argmax()), wanted.shape)
    return (found[0].node, found[0].operator), (float(wanted[worst]), float(got[worst]))


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
