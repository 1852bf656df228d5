"""Thresholds for a budget, found on the deployed engines: observe, simulate, search, measure, correct, check.

A machine gets faster and slower between two measurements by more than thresholds may be off. So the whole engine is
timed in turns with every chain, and all figures are given at one pace: that of the first measurement. A budget that is
a share of the whole engine's figure is resolved by the same measurements, so no pace enters it at all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.engine_entry import ExitsEntry
from ...bundle.open_bundle import Bundle
from ...errors import InputError, SelectionError
from ...profiles.probe_host import probe_host
from ...progress import Progress, silent
from ..device.threads import threads_or_default
from ..engines.residency import Residency
from ..engines.runner import EnginePool, runnable_engines
from ..exits.policy import CalibratedPolicy, Compare, ExitPolicy, Figures, QualityKind, Rule, check_name
from ..inputs.arrays import Array
from .data import LEAST_ROWS_TO_SPLIT, LabelledData, read_data, split
from .measure import Answers, ExitBench, costs_of, measured_figure, spread, time_in_turns
from .search import Problem, curve, everyone_first, search
from .simulate import ExitBudget, Observed, SegmentCosts, batch_max, latency_figure

# Simulated times are corrected until the measured figure is so near to the budget, at most so often.
_NEAR_BUDGET = 0.02
_MAX_CORRECTIONS = 4
# Farther than this from the budget, the result says so.
_BUDGET_TOLERANCE = 0.05
_RESIDENCY: Residency = "packed"


def calibrate(
    bundle: Bundle,
    data: Path,
    budget: ExitBudget,
    *,
    batch: int = 1,
    submodel: str | None = None,
    name: str | None = None,
    compare: Compare | None = None,
    rule: Rule = "per_row",
    truncate: bool = False,
    threads: int | None = None,
    progress: Progress = silent,
) -> CalibratedPolicy:
    """The thresholds that answer best within ``budget``, for requests of ``batch`` rows like those of ``data``.

    ``submodel`` is an id or a level, by default the largest. ``name`` is the policy's, by default the budget. Rows
    leave by ``compare``, by default that of the model's own gate, else ``<=``. ``truncate`` cuts texts that are too
    long. Nothing is written. Raises InputError for data that do not fit, SelectionError for a model without exits or a
    budget out of reach, naming the least possible figure, and a BundleError for engines that cannot be opened.
    """
    manifest, exits = bundle.manifest, _exits(bundle)
    name = check_name(str(budget) if name is None else name)
    entry = manifest.submodel(submodel) if submodel else max(manifest.submodels, key=lambda one: one.parameters)
    compare = compare or (exits.gate.compare if exits.gate else "<=")
    threads = threads_or_default(threads)
    residencies = dict.fromkeys((engine.id for engine in runnable_engines(bundle)), _RESIDENCY)
    pool = EnginePool(bundle, residencies, threads)
    try:
        bench = ExitBench(bundle, entry.id, pool)
        if bench.chain.exits == 1:
            raise SelectionError(f"submodel {entry.id}: has one exit, which always answers; nothing to calibrate")
        rows = read_data(data, bundle, bench.longest(batch), truncate)
        inside, outside = _parts(rows, batch)
        requests = bench.requests(inside, batch)

        samples: dict[tuple[int, tuple[Bucket, ...]], list[float]] = {}
        progress("observe every exit", 0, 1)
        answers = bench.observe(requests, samples)
        progress("observe every exit", 1, 1)
        right = answers.predicted[:, -1] if inside.labels is None else inside.labels
        observed = Observed(
            gate=batch_max(answers.entropy, batch) if rule == "batch_max" else answers.entropy,
            good=answers.predicted == right[:, None],
            length_class=bench.length_classes(inside, batch)[0],
            batch=batch,
            compare=compare,
        )
        costs = bench.segment_costs(inside, batch, samples, progress)

        def policy_of(thresholds: Array) -> ExitPolicy:
            return ExitPolicy(tuple(map(float, thresholds)), compare, rule, name)

        found = Fitter(bench, requests, observed, costs, budget, exits.classes, policy_of, progress).fit()
        policy = policy_of(found.thresholds)
        parts = [inside, outside] if outside else [inside]
        measured, whole, *checked = _against_the_whole_engine(bench, parts, batch, policy, found.whole_ms, progress)
    finally:
        pool.close()

    quality_is: QualityKind = "agreement_with_last_exit" if rows.labels is None else "accuracy"
    points = curve(found.problem, found.common)
    return CalibratedPolicy(
        name=name,
        submodel=entry.id,
        budget=str(budget),
        batch=batch,
        thresholds=policy.thresholds,
        compare=compare,
        rule=rule,
        histogram=measured.histogram,
        quality_is=quality_is,
        data_sha256=rows.sha256,
        rows=rows.rows,
        truncated_rows=rows.truncated,
        correction=found.correction,
        simulated=observed.figures(observed.leaving(found.thresholds), found.problem.costs),
        measured=measured,
        whole=whole,
        held_out=checked[0] if checked else None,
        held_out_whole=checked[1] if checked else None,
        curve=points,
        global_point=next(point for point in points if point.threshold == float(found.common[0])),
        engines=bench.engines,
        processor=probe_host().cpu,
        threads=threads,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        notes=tuple(_notes(rows, outside, budget, policy, measured, whole)),
    )


def _exits(bundle: Bundle) -> ExitsEntry:
    if bundle.manifest.exits is None:
        raise SelectionError(f"bundle {bundle.path}: this model has no exits to leave at; nothing to calibrate")
    return bundle.manifest.exits


def _parts(rows: LabelledData, batch: int) -> tuple[LabelledData, LabelledData | None]:
    """Rows to calibrate on, and rows to check on; each holds a whole request."""
    if rows.rows < batch:
        raise InputError(
            f"{rows.rows} rows are less than one request of {batch}; send more, or choose smaller requests"
        )
    inside, outside = split(rows)
    if outside is None or min(inside.rows, outside.rows) < batch:
        return rows, None
    return inside, outside


def _against_the_whole_engine(
    bench: ExitBench, parts: Sequence[LabelledData], batch: int, policy: ExitPolicy, whole_ms: float, progress: Progress
) -> list[Figures]:
    """The chain's and the whole engine's figures on every part, in this order, all timed in turns; at the pace at which
    the whole engine takes ``whole_ms`` on the first part."""
    answered: list[tuple[Answers, Array]] = []
    calls: list[list[Callable[[], object]]] = []
    for part in parts:
        requests = bench.requests(part, batch)
        right = bench.observe(requests, {}).predicted[:, -1] if part.labels is None else part.labels
        ways = [bench.answer(requests, policy), bench.answer_whole(requests)]
        answered += [(answers, right) for answers in ways]
        whole_requests = part.rows // batch
        flops = [way.flops[: whole_requests * batch].reshape(whole_requests, batch).sum(axis=1) for way in ways]
        timed = [requests[number] for number in spread(*flops)]
        calls.append([partial(bench.chain.run, feeds, policy) for feeds in timed])
        calls.append([partial(bench.run_whole, feeds) for feeds in timed])
    times = time_in_turns(calls, progress, "compare with the whole engine")
    slower = measured_figure(times[1], "mean_latency_ms") / whole_ms
    return [
        Figures(
            rows=len(right),
            costs=costs_of(taken / slower, answers.flops),
            quality=float((answers.predicted == right).mean()),
            histogram=tuple(np.bincount(answers.index, minlength=bench.chain.exits).tolist()),
        )
        for (answers, right), taken in zip(answered, times, strict=True)
    ]


def _notes(
    rows: LabelledData,
    outside: LabelledData | None,
    budget: ExitBudget,
    policy: ExitPolicy,
    measured: Figures,
    whole: Figures,
) -> Iterator[str]:
    """Notes for a reader of the figures."""
    if rows.labels is None:
        yield "no labels: quality is agreement with the last exit"
    if rows.truncated:
        yield f"{rows.truncated} of {rows.rows} texts were truncated"
    if outside is None:
        yield (
            f"{rows.rows} rows are too few to hold some out (from {LEAST_ROWS_TO_SPLIT} on, with a whole request in "
            "each part): all calibrate, and nothing is checked on rows that the search never saw"
        )
    if all(threshold < 0 for threshold in policy.thresholds):
        yield (
            f"full depth meets the budget: every exit is closed, and the whole engine answers the same in "
            f"{whole.costs.mean_latency_ms:.3g} ms"
        )
        return
    over = budget.of(measured.costs) / budget.resolved(budget.of(whole.costs)).limit
    if over > 1 + _BUDGET_TOLERANCE:
        figure = budget.limit * over
        yield (
            f"measured {budget.shown(figure)}, {over - 1:.0%} over the budget: other work on this "
            "machine disturbed the measurement, or few thresholds decide differently here"
        )


@dataclass(frozen=True, eq=False)
class Fit:
    """Thresholds float32 ``[m - 1]``, one for all exits and one for each, and the problem that they solve: its
    simulated times were multiplied by ``correction``, and its budget is resolved. ``figure`` is the budget's, by
    measurement; like all times it is of the pace at which the whole engine took ``whole_ms`` on average."""

    problem: Problem
    common: Array
    thresholds: Array
    correction: float
    figure: float
    whole_ms: float


@dataclass(eq=False)
class Fitter:
    """Facts of the rows to calibrate on, and the chain that answers their ``requests``.

    ``policy_of`` makes a policy of thresholds, ``classes`` is the model's number of them.
    """

    bench: ExitBench
    requests: Sequence[dict[str, Array]]
    observed: Observed
    costs: SegmentCosts
    budget: ExitBudget
    classes: int
    policy_of: Callable[[Array], ExitPolicy]
    progress: Progress
    # First measurement, 0 until then: the whole engine's mean latency, and the figure that sets the pace.
    _whole_ms: float = field(default=0.0, init=False)
    _whole_pace: float = field(default=0.0, init=False)

    def fit(self) -> Fit:
        """The thresholds within the budget and nearest to it; within 2 % where the entropies are dense enough.

        Raises SelectionError, naming the least possible figure, where no thresholds can meet the budget.
        """
        fits: list[Fit] = []
        correction = self._first_correction()
        for _ in range(_MAX_CORRECTIONS):
            problem = self._problem(correction)
            found = search(problem)
            if found is None:
                if fits:  # the least possible lies at the budget; what was found then stands
                    break
                raise self._out_of_reach(problem)
            common, thresholds = found
            if fits and np.array_equal(thresholds, fits[-1].thresholds):
                break
            ratio = self._measured_over_simulated(thresholds)
            if not self.budget.is_latency:
                return Fit(self._problem(ratio), common, thresholds, ratio, problem.cost(thresholds), self._whole_ms)
            figure = problem.cost(thresholds) / correction * ratio
            fits.append(Fit(problem, common, thresholds, correction, figure, self._whole_ms))
            if abs(figure / problem.budget.limit - 1) <= _NEAR_BUDGET:
                break
            correction = ratio
        limit = fits[0].problem.budget.limit
        return min(fits, key=lambda fit: (fit.figure > limit * (1 + _NEAR_BUDGET), abs(fit.figure - limit)))

    def _problem(self, correction: float) -> Problem:
        # The limit of a share of latency is 0 until the whole engine was timed: no thresholds fit before.
        whole = self._whole_pace if self.budget.is_latency else self._whole_flops
        return Problem(self.observed, self.costs.scaled(correction), self.budget.resolved(whole), self.classes)

    @cached_property
    def _whole_flops(self) -> float:
        return float(self.bench.whole_flops(self.requests).mean()) if self.budget.is_share else 0.0

    @property
    def _pace_metric(self) -> str:
        """The figure by which paces are compared: the budget's own where that is what a share is taken of."""
        return self.budget.metric if self.budget.is_share and self.budget.is_latency else "mean_latency_ms"

    def _first_correction(self) -> float:
        """1, unless the least possible figure decides, or a share of the whole engine's latency has no limit yet: then
        that is measured first."""
        problem = self._problem(1.0)
        first = everyone_first(problem)
        if problem.fits(first) or not self.budget.is_latency:
            return 1.0
        return self._measured_over_simulated(first)

    def _out_of_reach(self, problem: Problem) -> SelectionError:
        least = problem.cost(everyone_first(problem))
        if self.budget.is_share:
            least *= self.budget.limit / problem.budget.limit
        return SelectionError(
            f"budget {self.budget}: out of reach; with every row leaving at the first exit it is "
            f"{self.budget.shown(least)} on this host, the least possible; ask for more"
        )

    def _measured_over_simulated(self, thresholds: Array) -> float:
        """Ratio of the budget's figure, or of the mean latency where the budget is no latency, on the same requests; at
        the pace of the first measurement."""
        metric = self.budget.metric if self.budget.is_latency else "mean_latency_ms"
        policy = self.policy_of(thresholds)
        simulated = self.observed.request_ms(self.observed.leaving(thresholds), self.costs)
        timed = spread(simulated)
        feeds = [self.requests[number] for number in timed]
        chain, whole = time_in_turns(
            [
                [partial(self.bench.chain.run, one, policy) for one in feeds],
                [partial(self.bench.run_whole, one) for one in feeds],
            ],
            self.progress,
            "measure thresholds",
        )
        self._whole_ms = self._whole_ms or measured_figure(whole, "mean_latency_ms")
        pace = measured_figure(whole, self._pace_metric)
        self._whole_pace = self._whole_pace or pace
        measured = measured_figure(chain, metric) * self._whole_pace / pace
        return measured / float(latency_figure(simulated[timed], metric))
