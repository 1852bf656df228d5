"""The thresholds that answer best within a budget: one for every exit by bisection, then one per exit. Pure."""

import math
from dataclasses import dataclass

import numpy as np

from ..exits.policy import CurvePoint
from ..inputs.arrays import Array
from .simulate import CLOSED, ExitBudget, Observed, SegmentCosts, thresholds_between

# An exit is tried closed first where the rows that leave there, at least this many, are answered worse than the last
# exit would by more than this share of them, and by more than chance.
WEAK_BY = 0.02
WEAK_ROWS = 30
_CURVE_POINTS = 100
_CANDIDATES_PER_EXIT = 16
_PASSES_OVER_EXITS = 2
_BISECTION_STEPS = 10
# By how many standard deviations the best of some hundred candidates must win: at 1 nearly every search on noise moves,
# at 2 one in three, at 3 one in thirty.
_WINNING_DEVIATIONS = 3.0


@dataclass(frozen=True, eq=False)
class Problem:
    """Rows observed, what segments cost, the budget, and the number of ``classes`` that bounds the entropy."""

    observed: Observed
    costs: SegmentCosts
    budget: ExitBudget
    classes: int

    def cost(self, thresholds: Array) -> float:
        """The budget's figure under ``thresholds`` float32 ``[m - 1]``."""
        return self.observed.metric(self.observed.leaving(thresholds), self.costs, self.budget.metric)

    def fits(self, thresholds: Array) -> bool:
        return self.cost(thresholds) <= self.budget.limit

    def quality(self, thresholds: Array) -> float:
        return self.observed.quality(self.observed.leaving(thresholds))

    def everywhere(self, threshold: float, open_exits: Array) -> Array:
        """``threshold`` at the exits of the mask ``open_exits`` ``[m - 1]``, the others closed."""
        return np.where(open_exits, np.float32(threshold), np.float32(CLOSED))

    def candidates(self, open_exits: Array) -> Array:
        """Every common threshold of these exits that decides differently, rising."""
        early = self.observed.gate[:, :-1][:, open_exits]
        return thresholds_between(early, self.observed.compare, self.classes)


def everyone_first(problem: Problem) -> Array:
    """Thresholds with which every row leaves at the first exit: the least that any can cost."""
    return problem.everywhere(problem.candidates(_all(problem))[-1], _all(problem))


def global_thresholds(problem: Problem, open_exits: Array | None = None) -> Array | None:
    """The smallest common threshold of the open exits that fits the budget, as ``[m - 1]``; None if none does.

    The exit of every row falls with the threshold, so its cost does too, and bisection finds the place.
    """
    mask = _all(problem) if open_exits is None else open_exits
    candidates = problem.candidates(mask)
    low, high = -1, len(candidates) - 1
    if not problem.fits(problem.everywhere(candidates[high], mask)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if problem.fits(problem.everywhere(candidates[middle], mask)):
            high = middle
        else:
            low = middle
    return problem.everywhere(candidates[high], mask)


def curve(problem: Problem, point: Array) -> tuple[CurvePoint, ...]:
    """Up to ``_CURVE_POINTS`` common thresholds over the observed entropies, and the one of ``point``, rising."""
    candidates = problem.candidates(_all(problem))
    places = np.unique(np.linspace(0, len(candidates) - 1, _CURVE_POINTS).round().astype(int))
    return tuple(
        _curve_point(problem, float(threshold)) for threshold in np.unique([*candidates[places], np.float32(point[0])])
    )


def search(problem: Problem) -> tuple[Array, Array] | None:
    """The common and the per-exit thresholds ``[m - 1]`` that fit the budget, or None if none do.

    The second answer no fewer rows well than the first. They differ only by steps that are no chance: a step must win
    more rows than it loses by more than the square root of their sum.
    """
    common = global_thresholds(problem)
    if common is None:
        return None
    found = _refined(problem, _without_weak_exits(problem, common))
    return common, found if np.array_equal(found, common) else _with_margins(problem, found)


def _without_weak_exits(problem: Problem, common: Array) -> Array:
    observed = problem.observed
    index = observed.leaving(common)
    weak = np.zeros(observed.exits - 1, bool)
    for exit_index in range(observed.exits - 1):
        rows = index == exit_index
        here, last = observed.good[rows, exit_index], observed.good[rows, -1]
        is_worse = rows.sum() >= WEAK_ROWS and last.mean() - here.mean() > WEAK_BY
        weak[exit_index] = is_worse and _is_no_chance(here, last)
    singles = [np.arange(observed.exits - 1) == exit_index for exit_index in np.flatnonzero(weak)]
    for closing in ([weak] if weak.any() else []) + (singles if len(singles) > 1 else []):
        thresholds = global_thresholds(problem, ~closing)
        if thresholds is not None and problem.quality(thresholds) >= problem.quality(common):
            return thresholds
    return common


def _refined(problem: Problem, start: Array) -> Array:
    """Coordinate search: each exit in turn, the others moved together so that the budget is kept and used."""
    observed = problem.observed
    current = start
    for _ in range(_PASSES_OVER_EXITS):
        before = current
        for exit_index in range(observed.exits - 1):
            reaching = observed.leaving(current) >= exit_index
            values = thresholds_between(observed.gate[reaching, exit_index], observed.compare, problem.classes)
            places = np.unique(np.linspace(0, len(values) - 1, _CANDIDATES_PER_EXIT).round().astype(int))
            moved = [_moved(problem, current, exit_index, value) for value in values[places]]
            fitting = [thresholds for thresholds in moved if thresholds is not None]
            if not fitting:
                continue
            # Among equals the one with the larger margin to the budget.
            best = max(fitting, key=lambda thresholds: (problem.quality(thresholds), -problem.cost(thresholds)))
            before_and_after = (observed.answers(observed.leaving(thresholds)) for thresholds in (current, best))
            if _is_no_chance(*before_and_after):
                current = best
        if np.array_equal(before, current):
            break
    return current


def _moved(problem: Problem, current: Array, exit_index: int, value: float) -> Array | None:
    """``current`` with ``value`` at one exit, and the others as far down, in one movement, as the budget allows."""
    highest = problem.candidates(_all(problem))[-1]
    others = (current >= 0) & (np.arange(len(current)) != exit_index)

    def at(level: float) -> Array:
        """Open exits at 0 for level 0, as they are for 1, letting all leave for 2."""
        moved = current * level if level <= 1 else current + (highest - current) * (level - 1)
        thresholds = np.where(others, moved, current).astype(np.float32)
        thresholds[exit_index] = value
        return thresholds

    low, high = 0.0, 2.0
    if problem.fits(at(low)):
        return at(low)
    if not problem.fits(at(high)):
        return None
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if problem.fits(at(middle)) else (middle, high)
    return at(high)


def _is_no_chance(before: Array, after: Array) -> bool:
    """Whether answers became better, row by row, by more than chance would make the best of many candidates."""
    won, lost = int((after & ~before).sum()), int((before & ~after).sum())
    return won - lost > _WINNING_DEVIATIONS * math.sqrt(won + lost)


def _with_margins(problem: Problem, thresholds: Array) -> Array:
    """The same decisions, each threshold halfway between the rows that it parts; closed where none leave."""
    observed = problem.observed
    index = observed.leaving(thresholds)
    placed: Array = thresholds.copy()
    for exit_index in range(observed.exits - 1):
        reaching = observed.gate[index >= exit_index, exit_index]
        leave = int((index == exit_index).sum())
        values = thresholds_between(reaching, observed.compare, problem.classes)
        ordered = np.unique(reaching[np.isfinite(reaching)])
        counts = np.searchsorted(np.sort(reaching[np.isfinite(reaching)]), ordered, side="right")
        placed[exit_index] = values[int(np.searchsorted(counts, leave, side="right")) if leave else 0]
    return placed


def _curve_point(problem: Problem, threshold: float) -> CurvePoint:
    index = problem.observed.leaving(problem.everywhere(threshold, _all(problem)))
    return CurvePoint(threshold, problem.observed.figures(index, problem.costs))


def _all(problem: Problem) -> Array:
    return np.ones(problem.observed.exits - 1, bool)
