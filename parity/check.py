"""The check from top to bottom: open, match, ask both sides, judge, and say where it goes wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..argument_types import checked, number_within
from ..bundle.manifest import MANIFEST_NAME
from ..compiler.parity.compare import Rounding
from ..errors import InputError
from ..progress import Progress, silent
from ..runtime.inputs.arrays import Array, Arrays
from ..runtime.inputs.files import read_npz
from .cases import IDS, MASK, Trial, make_cases, of_tokens, traced_sizes
from .export import Export, open_exports
from .locate import Fault, locate
from .match import Match, match_inputs, match_outputs, require_names
from .model import Model, open_model
from .served import SENTENCES, TEXTS, BundleExport, ServerExport, is_url, text_trials
from .steps import in_pieces, part_of, past_of, run_steps
from .verdict import Figures, Rule, hidden_out, is_luck_possible, own_rounding, remeasured, simulated
from .weights import changed_tokens

_MOST_INPUT_BYTES = 2**32
_YOURS = "your inputs"


@dataclass(frozen=True)
class Failure:
    """A case that the model answers and the export does not; ``said`` is what its runtime said."""

    case: str
    said: str


@dataclass(frozen=True)
class GraphReport:
    """One graph of an export beside the model. ``matched`` are outputs and inputs, ``unmatched`` outputs that are
    compared with nothing; ``figures`` by case and output; ``fault`` is where it goes wrong."""

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
    failures: tuple[Failure, ...]
    fault: Fault | None = None

    @property
    def is_right(self) -> bool:
        return not self.failures and all(figure.is_right for figure in self.figures)

    @property
    def worst(self) -> Figures | None:
        """The first figures that are not accepted, else the ones with the largest difference."""
        wrong = [figure for figure in self.figures if not figure.is_right]
        return max(wrong or self.figures, key=lambda figure: figure.max_abs, default=None)


@dataclass(frozen=True)
class ParityReport:
    """Whether ``export`` answers as ``against`` does, graph by graph."""

    export: str
    against: str
    settings: Mapping[str, Any]
    graphs: tuple[GraphReport, ...]
    files: tuple[str, ...]
    model_files: tuple[str, ...]
    verdict: bool

    @property
    def is_right(self) -> bool:
        return self.verdict

    @property
    def line(self) -> str:
        """One line that says it all."""
        wrong = next((graph for graph in self.graphs if not graph.is_right), None)
        chosen = wrong or self.graphs[0]
        cases, worst = sum(len(graph.cases) for graph in self.graphs), chosen.worst
        subject = f"{Path(self.export).name} against {Path(self.against).name}"
        if wrong is None:
            off = max((f.max_abs for graph in self.graphs for f in graph.figures), default=0.0)
            return f"PARITY OK: {subject}: {cases} cases in {chosen.precision}, max abs {off:.2g}"
        where = f"; {chosen.fault}" if chosen.fault else ""
        if chosen.failures:
            return f"PARITY BROKEN: {subject}: fails on {chosen.failures[0].case}: {chosen.failures[0].said}{where}"
        assert worst is not None
        return f"PARITY BROKEN: {subject}: {worst.output} on {worst.case}: {worst.why}{where}"


@checked
def check_parity(
    export: str | Path,
    against: str | Path | torch.nn.Module,
    *,
    map: Mapping[str, str] | None = None,
    inputs: Mapping[str, Array] | None = None,
    texts: Sequence[str] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    preset: Literal["strict", "deploy"] | None = None,
    library: str | Path | None = None,
    progress: Progress = silent,
) -> ParityReport:
    """Whether ``export`` answers as the model ``against`` does, and where it goes wrong if it does not.

    ``map`` says which name of the export is which of the model's; ``inputs`` adds a case of arrays by the model's
    names, ``texts`` cases of texts by its tokenizer. ``library`` holds custom operators. As ``nestforge parity``.
    Raises InputError or CheckpointError where nothing can be judged.
    """
    number_within("seed", seed, int, {"min": 0})
    if tolerance is not None:
        number_within("tolerance", tolerance, float, {"above": 0})
    if tolerance is not None and preset is not None:
        raise InputError("`tolerance` and `preset` are two rules; expected one of them")
    opened = _opened(export, None if library is None else Path(library))
    require_names(opened, map or {})
    model = open_model(Path(against) if isinstance(against, str) else against)
    reports = []
    for number, one in enumerate(opened):
        progress("graphs", number, len(opened))
        rule = Rule(one.precision, model.facts.depth, tolerance, preset)
        reports.append(_check(one, model, rule, map or {}, inputs, texts, seed, progress))
        one.close()
    library = None if library is None else str(library)
    settings = {"map": dict(map or {}), "seed": seed, "tolerance": tolerance, "preset": preset, "library": library}
    given = {"inputs": inputs, "texts": texts, "a module in memory": isinstance(against, torch.nn.Module)}
    settings["own"] = [name for name, each in given.items() if each]
    return ParityReport(
        str(export),
        model.label,
        settings,
        tuple(reports),
        tuple(str(file) for one in opened for file in one.files),
        tuple(str(file) for file in model.files),
        all(report.is_right for report in reports),
    )


def _opened(export: str | Path, library: Path | None) -> list[Export]:
    if is_url(str(export)):
        return [ServerExport(str(export))]
    if (Path(export) / MANIFEST_NAME).is_file():
        return [BundleExport(Path(export))]
    return open_exports(Path(export), library)


def _check(
    export: Export,
    model: Model,
    rule: Rule,
    given: Mapping[str, str],
    own: Mapping[str, Array] | None,
    texts: Sequence[str] | None,
    seed: int,
    progress: Progress,
) -> GraphReport:
    model = part_of(model, export)
    if isinstance(export, ServerExport):
        inputs = [Match(TEXTS, TEXTS, "texts")]
        trials = text_trials(model, export, texts or SENTENCES)
    else:
        inputs = match_inputs(export, model.inputs, given)
        trials = make_cases(export, inputs, model, seed)
        tokens = changed_tokens(export, model)
        trials += [of_tokens(trials, tokens)] if tokens.size else []
        trials = [*(in_pieces(trials) if past_of(export) else trials), *_users(own, inputs)]
        if {match.model for match in inputs} >= {IDS, MASK} and not past_of(export):
            trials += text_trials(model, export, texts or ())
        elif texts:
            raise InputError(f"{export.label}: takes no texts: expected inputs {IDS} and {MASK}, and no cache")
    export.ready()
    expected, refused = _expected(model, trials, progress)
    if _YOURS in refused:
        raise InputError(f"`inputs`: {model.label} refuses them: {refused[_YOURS]}")
    trials = [trial for trial in trials if trial.name in expected]
    if not trials:
        raise InputError(f"{model.label}: answers none of the cases: {next(iter(refused.values()))}")
    answered, failures = _answered(export, model, inputs, trials, progress)
    for trial in traced_sizes(trials) if not answered else ():
        if found := _answered(export, model, inputs, [trial], progress)[0]:
            answered, trials = found, [*trials, trial]
            expected |= _expected(model, [trial], progress)[0]
            break
    if not answered:
        raise InputError(f"{export.label}: answers none of {len(trials)} cases: {failures[0].said}")
    first = next(iter(answered))
    if isinstance(export, ServerExport) and (problem := export.width_problem(answered[first], expected[first])):
        raise InputError(problem)
    outputs, unmatched = match_outputs(export, answered[first], expected[first], given)
    answered = {case: {m.model: arrays[m.name] for m in outputs} for case, arrays in answered.items()}
    figures = _judged(model, rule, [trial for trial in trials if trial.name in answered], expected, answered)
    report = GraphReport(
        export.label,
        export.kind,
        export.precision,
        str(rule),
        tuple(inputs),
        tuple(outputs),
        tuple(unmatched),
        tuple(trial.name for trial in trials),
        tuple(f"{case}: {said}" for case, said in refused.items()),
        tuple(figures),
        tuple(failures),
    )
    if report.is_right:
        return report
    if (fault := _reshaped(expected, answered)) is not None:
        return replace(report, fault=fault)
    wrong = frozenset(figure.case for figure in figures if not figure.is_right)
    return replace(
        report, fault=locate(export, model, rule, inputs, outputs, trials, wrong | {f.case for f in failures}, failures)
    )


def _reshaped(expected: Mapping[str, Arrays], answered: Mapping[str, Arrays]) -> Fault | None:
    """The first output of another shape than the model's, behind which no value can be told from another."""
    for case, arrays in answered.items():
        for output, array in arrays.items():
            got, wanted = list(array.shape), list(expected[case][output].shape)
            if got != wanted:
                return Fault(output, f"another shape: {got} in the place of {wanted}")
    return None


def read_inputs(path: Path) -> dict[str, Array]:
    """Arrays by name of an NPZ file. Raises InputError."""
    return read_npz(path, _MOST_INPUT_BYTES)


def _users(own: Mapping[str, Array] | None, inputs: Sequence[Match]) -> list[Trial]:
    if own is None:
        return []
    names = {match.name: match.model for match in inputs}
    feeds = {names.get(name, name): array for name, array in own.items()}
    missing = {match.model for match in inputs} - feeds.keys()
    if missing:
        raise InputError(f"`inputs`: lacks {', '.join(sorted(missing))}; has {', '.join(own)}")
    return [Trial(_YOURS, {match.model: np.asarray(feeds[match.model]) for match in inputs})]


def _expected(model: Model, trials: Sequence[Trial], progress: Progress) -> tuple[dict[str, Arrays], dict[str, str]]:
    """The model's answers in float64 by case, and what it said to cases that it refuses, which nobody can blame an
    export for."""
    found: dict[str, Arrays] = {}
    refused: dict[str, str] = {}
    with model.wide() as wide:
        for number, trial in enumerate(trials):
            progress("model", number, len(trials))
            try:
                found[trial.name] = wide(trial.feeds)
            except Exception as failure:  # noqa: BLE001  (whatever a model's own code raises on these sizes)
                refused[trial.name] = f"{type(failure).__name__}: {failure}"[:200]
    return found, refused


def exported(export: Export, inputs: Sequence[Match], trial: Trial) -> dict[str, Array]:
    """The inputs of ``trial`` by the export's names and in its types."""
    found = {}
    for match in inputs:
        port = export.port(match.name)
        assert port is not None
        array = trial.feeds[match.model]
        found[match.name] = array if port.dtype == "str" else np.ascontiguousarray(array.astype(port.dtype))
    return found


def _answered(
    export: Export, model: Model, inputs: Sequence[Match], trials: Sequence[Trial], progress: Progress
) -> tuple[dict[str, dict[str, Array]], list[Failure]]:
    found: dict[str, dict[str, Array]] = {}
    failures = []
    for number, trial in enumerate(trials):
        progress("export", number, len(trials))
        try:
            found[trial.name] = run_steps(export, exported(export, inputs, trial), trial, model)
        except InputError as failure:
            failures.append(Failure(trial.name, str(failure)))
    return found, failures


def _judged(
    model: Model,
    rule: Rule,
    trials: Sequence[Trial],
    expected: Mapping[str, Arrays],
    answered: Mapping[str, Arrays],
) -> list[Figures]:
    owns: dict[tuple[str, str], Rounding] = {}
    for trial in trials:
        passed, mask = passed_in(model, rule, trial), trial.feeds.get(MASK)
        for output in answered[trial.name]:
            wanted = hidden_out(expected[trial.name][output], mask)
            owns[trial.name, output] = own_rounding(rule, wanted, hidden_out(passed[output], mask))
    found: list[Figures] = []
    for trial in trials:
        mask = trial.feeds.get(MASK)
        for output, array in answered[trial.name].items():
            wanted, got = (hidden_out(each, mask) for each in (expected[trial.name][output], array))
            own = owns[trial.name, output]
            if rule.has_fixed_scales:
                own = rule.of_fixed_scales([each for (_, name), each in owns.items() if name == output])
            figures = rule.judge(trial.name, output, wanted, got, own)
            if not figures.is_right and not rule.simulates and is_luck_possible(figures):
                figures = _after_luck(model, rule, trial, figures, wanted, got, own)
            found.append(figures)
    return found


def passed_in(model: Model, rule: Rule, trial: Trial) -> dict[str, Array]:
    """PyTorch's answers as it rounds by itself, or as the export's precision does."""
    if not rule.simulates:
        return model.answer(trial.feeds)
    with simulated(rule.precision):
        return model.answer(trial.feeds)


def _after_luck(
    model: Model, rule: Rule, trial: Trial, figures: Figures, wanted: Array, got: Array, own: Rounding
) -> Figures:
    mask = trial.feeds.get(MASK)
    moved = lambda seed: hidden_out(model.answer(trial.feeds, model.nudged(seed))[figures.output], mask)  # noqa: E731
    for worse in remeasured(own, wanted, moved):
        figures = rule.judge(trial.name, figures.output, wanted, got, worse)
        if figures.is_right:
            break
    return figures
