"""Thresholds whose measured figure, not only the simulated one, meets the budget.

A machine gets faster and slower between two measurements by more than thresholds may be off. So the whole engine is
timed in turns with every chain, and all figures are given at one pace: that of the first measurement. A budget that is
a share of the whole engine's figure is resolved by the same measurements, so no pace enters it at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from ...errors import SelectionError
from ..exits.policy import ExitPolicy
from ..inputs.arrays import Array
from .budget import ExitBudget
from .curve import Observed, SegmentCosts, latency_figure
from .measure import ExitBench, Progress, measured_figure, spread, time_in_turns
from .search import Problem, everyone_first, search

# Simulated times are corrected until the measured figure is so near to the budget, at most so often.
_NEAR_BUDGET = 0.02
_MAX_CORRECTIONS = 4


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
    """What is known of the rows to calibrate on, and the chain that answers their ``requests``.

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
    # Of the first measurement, 0 until then: the whole engine's mean latency, and the figure that sets the pace.
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
        """Of the budget's figure, or of the mean latency where the budget is no latency, on the same requests; at the
        pace of the first measurement."""
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
