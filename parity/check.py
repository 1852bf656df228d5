"""The check from top to bottom: open, match, ask both sides, judge, and say where it goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..argument_types import takes_request
from ..compiler.work.tensor_file import release_pages
from ..errors import InputError
from ..exporters.sentence_transformers.library import SENTENCES
from ..profiles.parity_request import ParityRequest
from ..runtime.inputs.arrays import Array, Arrays
from .cases import (
    IDS,
    MASK,
    Trial,
    has_library,
    library_of,
    library_trials,
    make_cases,
    of_tokens,
    text_trials,
    traced_sizes,
)
from .explanations import skipped
from .export import Export, Match, match_inputs, match_outputs, require_names
from .exports import TEXTS, BundleExport, BundleTexts, ServerExport, open_exports
from .locate import Fault, locate
from .model import Model, open_model, submodel_of, universal_of
from .steps import Pair, in_pieces, part_of, past_of
from .verdict import Figures, Rule, judged
from .weights import changed_tokens

_YOURS = "your inputs"
_OTHER_TOKENS = "another tokenizer, prompt or longest text, where the same submodel is right on tokens"


@dataclass(frozen=True)
class GraphReport:
    """One graph of an export beside the model. ``inputs`` and ``outputs`` are matched, ``unmatched`` outputs compared
    with nothing; ``figures`` are by case and output, ``failures`` what the export said to cases that the model answers;
    ``fault`` is where it goes wrong."""

    export: str
    kind: str
    precision: str
    rule: str
    inputs: tuple[Match, ...]
    outputs: tuple[Match, ...]
    unmatched: tuple[str, ...]
    cases: tuple[str, ...]
    refused: tuple[str, ...]
    figures: tuple[Figures, ...]
    failures: Mapping[str, str]
    fault: Fault | None = None

    @property
    def is_right(self) -> bool:
        return not self.failures and all(figure.is_right for figure in self.figures)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Figures, by ``COLUMNS``."""
        failed = [(case, "-", "-", "-", "-", "-", "-", f"fails: {said}") for case, said in self.failures.items()]
        return [*(figure.row for figure in self.figures), *failed]

    @property
    def problem(self) -> str | None:
        """The worst fault; None where nothing is wrong."""
        for case, said in self.failures.items():
            return f"fails on {case}: {said}"
        wrong = [figure for figure in self.figures if not figure.is_right]
        worst = max(wrong, key=lambda figure: figure.output.max_abs, default=None)
        return None if worst is None else f"{worst.output.name} on {worst.case}: {worst.why}"


@dataclass(frozen=True)
class ParityReport:
    """Whether ``export`` answers as ``against`` does, graph by graph. ``not_checked`` are graphs that ``against`` has
    nothing to hold against, each with what it would take."""

    export: str
    against: str
    settings: Mapping[str, Any]
    graphs: tuple[GraphReport, ...]
    files: tuple[str, ...]
    model_files: tuple[str, ...]
    verdict: bool
    not_checked: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        return self.verdict

    @property
    def line(self) -> str:
        """One line that says it all."""
        wrong = next((graph for graph in self.graphs if not graph.is_right), None)
        against = Path(self.against).name
        if wrong is not None:
            where = f"; {wrong.fault}" if wrong.fault else ""
            return f"PARITY BROKEN: {Path(wrong.export).name} against {against}: {wrong.problem}{where}"
        off = max((figure.output.max_abs for graph in self.graphs for figure in graph.figures), default=0.0)
        cases, precision = sum(len(graph.cases) for graph in self.graphs), self.graphs[0].precision
        return f"PARITY OK: {Path(self.export).name} against {against}: {cases} cases in {precision}, max abs {off:.2g}"


@takes_request(ParityRequest)
def check_parity(request: ParityRequest) -> ParityReport:
    """Whether ``export`` answers as the model ``against`` does, and where it goes wrong if it does not.

    As ``nestforge parity``. Every submodel of a bundle is compared, the smaller ones with slices of the model's folder;
    with another model the whole one alone. Raises InputError or CheckpointError where nothing can be judged.
    """
    opened = open_exports(request.export, None if request.library is None else Path(request.library))
    require_names(opened, request.map or {})
    model, universal = open_model(request.against), None
    lacking = {export.label: lack for export in opened if (lack := _lack(export, model)) is not None}
    opened = [export for export in opened if export.label not in lacking] or opened
    graphs = []
    for number, export in enumerate(opened):
        request.progress("graphs", number, len(opened))
        own = library_of(model, export) if isinstance(export, BundleTexts) else part_of(model, export)
        if isinstance(export, BundleExport) and export.submodel is not None and not isinstance(export, BundleTexts):
            universal = universal or universal_of(model, export.folder)
            own = submodel_of(universal, export.submodel)
        graphs.append(_check(export, own, request))
        export.close()
    return ParityReport(
        str(request.export),
        model.label,
        {**request.settings, "module": isinstance(request.against, torch.nn.Module)},
        tuple(graphs),
        tuple(dict.fromkeys(str(file) for export in opened for file in export.files)),
        tuple(str(file) for file in model.files),
        all(graph.is_right for graph in graphs),
        tuple(f"{label}: {lack}" for label, lack in lacking.items()),
    )


def _lack(export: Export, model: Model) -> str | None:
    """Packages that a check of ``export`` lacks here."""
    if isinstance(export, BundleTexts) and not has_library(model):
        return "needs the folder of sentence-transformers, and that library"
    return "needs the model's folder" if export.submodel is not None and model.folder is None else None


def _check(export: Export, model: Model, request: ParityRequest) -> GraphReport:
    rule = Rule(export.precision, model.facts.depth, request.tolerance, request.preset)
    given = request.map or {}
    if export.port(TEXTS) is not None:
        pair = Pair(export, model, [Match(port.name, port.name, "texts") for port in export.inputs])
        asked = request.texts or SENTENCES
        is_server = isinstance(export, ServerExport)
        trials = text_trials(model, asked, for_server=True) if is_server else library_trials(model, asked)
    else:
        pair = Pair(export, model, match_inputs(export, model.inputs, given))
        trials = _trials(pair, request)
    # One side after the other, since either holds all weights.
    release_pages()
    export.ready()
    answered, failed = _asked("export", pair.answer, trials, request, InputError)
    export.rest()
    release_pages()
    # Whatever a model's own code raises on these sizes: nobody can blame an export for it.
    expected, refused = _asked("model", lambda trial: model.wide_answer(trial.feeds), trials, request, Exception)
    if _YOURS in refused:
        raise InputError(f"`inputs`: {model.label} refuses them: {refused[_YOURS]}")
    trials = [trial for trial in trials if trial.name in expected]
    if not trials:
        raise InputError(f"{model.label}: answers none of the cases: {next(iter(refused.values()))}")
    answered = {name: answer for name, answer in answered.items() if name in expected}
    failed = {name: why for name, why in failed.items() if name in expected}
    for trial in traced_sizes(trials) if not answered else ():
        if answered := _asked("export", pair.answer, [trial], request, InputError)[0]:
            trials.append(trial)
            expected[trial.name] = model.wide_answer(trial.feeds)
            break
    if not answered:
        raise InputError(f"{export.label}: answers none of {len(trials)} cases: {next(iter(failed.values()))}")
    first = next(iter(answered))
    if isinstance(export, ServerExport):
        export.require_width(answered[first], expected[first])
    outputs, unmatched = match_outputs(export, answered[first], expected[first], given)
    pair = replace(pair, outputs={m.model: m.name for m in outputs})
    answered = {case: {m.model: arrays[m.name] for m in outputs} for case, arrays in answered.items()}
    figures = judged(model, rule, [trial for trial in trials if trial.name in answered], expected, answered)
    report = GraphReport(
        export.label,
        export.kind,
        export.precision,
        str(rule),
        tuple(pair.inputs),
        tuple(outputs),
        tuple(unmatched),
        tuple(trial.name for trial in trials),
        tuple(f"{case}: {said}" for case, said in refused.items()),
        tuple(figures),
        failed,
    )
    if report.is_right:
        return report
    wrong = {figure.case for figure in figures if not figure.is_right} | failed.keys()
    if isinstance(export, BundleTexts):
        return replace(report, fault=Fault("texts", _OTHER_TOKENS))
    fault = _reshaped(model, trials, expected, answered) or locate(pair, rule, trials, answered, wrong, failed)
    return replace(report, fault=fault)


def _trials(pair: Pair, request: ParityRequest) -> list[Trial]:
    export, model = pair.export, pair.model
    trials = make_cases(export, pair.inputs, model, request.seed)
    tokens = changed_tokens(export, model)
    trials += [of_tokens(trials, tokens)] if tokens.size else []
    trials = in_pieces(export, trials) if past_of(export) else trials
    trials += _users(request.inputs, pair)
    if {match.model for match in pair.inputs} >= {IDS, MASK} and not past_of(export):
        return trials + text_trials(model, request.texts or ())
    if request.texts:
        raise InputError(f"{export.label}: takes no texts: expected inputs {IDS} and {MASK}, and no cache")
    return trials


def _users(own: Mapping[str, Array] | None, pair: Pair) -> list[Trial]:
    if own is None:
        return []
    names = {match.name: match.model for match in pair.inputs}
    feeds = {names.get(name, name): np.asarray(array) for name, array in own.items()}
    taken = set(names.values())
    if feeds.keys() != taken:
        found = [("lacks", taken - feeds.keys()), ("takes no", feeds.keys() - taken)]
        said = "; ".join(f"{what} {', '.join(sorted(which))}" for what, which in found if which)
        raise InputError(f"`inputs`: {said}; expected {', '.join(sorted(taken))}, has {', '.join(own)}")
    return [Trial(_YOURS, feeds)]


def _reshaped(
    model: Model, trials: Sequence[Trial], expected: Mapping[str, Arrays], answered: Mapping[str, Arrays]
) -> Fault | None:
    """The first output of another shape than the model's, behind which no value can be told from another."""
    for trial in trials:
        for output, array in answered.get(trial.name, {}).items():
            got, wanted = list(array.shape), list(expected[trial.name][output].shape)
            if got != wanted:
                words = f"another shape: {got} in the place of {wanted}"
                return Fault(*(skipped(model, trial.feeds, output, array) or (output, words)))
    return None


def _asked(
    side: str, ask: Callable[[Trial], Arrays], trials: Sequence[Trial], request: ParityRequest, refusal: type[Exception]
) -> tuple[dict[str, Arrays], dict[str, str]]:
    """Answers of one side by case, and what was said to cases that it refuses."""
    found: dict[str, Arrays] = {}
    refused: dict[str, str] = {}
    for number, trial in enumerate(trials):
        request.progress(side, number, len(trials))
        try:
            found[trial.name] = ask(trial)
        except refusal as failure:
            said = str(failure) if isinstance(failure, InputError) else f"{type(failure).__name__}: {failure}"[:200]
            refused[trial.name] = said
    return found, refused
