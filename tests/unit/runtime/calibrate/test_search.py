import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.runtime.calibrate.search import Problem, curve, everyone_first, global_thresholds, search
from nestforge.runtime.calibrate.simulate import CLOSED, ExitBudget, Observed, SegmentCosts

CLASSES = 3
METRICS = ["mean_flops", "mean_latency_ms", "p95_latency_ms"]


@st.composite
def problems(draw: st.DrawFn, most_rows: int = 16) -> Problem:
    rows, exits, batch = draw(st.integers(4, most_rows)), draw(st.integers(2, 4)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    entropy = rng.choice(np.arange(17) / 16, (rows, exits)).astype(np.float32)
    observed = Observed(entropy, rng.random((rows, exits)) < 0.6, rng.integers(0, 2, rows), batch, "<=")
    steps = rng.integers(1, 9, (exits, batch + 1, 2)).astype(float)
    steps[:, 0] = 0
    costs = SegmentCosts(steps.cumsum(axis=1).cumsum(axis=2), 7 * steps.cumsum(axis=1).cumsum(axis=2))
    metric = draw(st.sampled_from(METRICS))
    closed = Problem(observed, costs, ExitBudget(metric, 1.0), CLASSES)
    least = closed.cost(everyone_first(closed))
    most = closed.cost(np.full(exits - 1, CLOSED, np.float32))
    limit = least + draw(st.floats(-0.2, 1.2)) * (most - least)
    return Problem(observed, costs, ExitBudget(metric, limit), CLASSES)


@given(problems())
def test_bisection_finds_what_trying_every_threshold_finds(problem: Problem) -> None:
    every = np.ones(problem.observed.exits - 1, bool)
    fitting = [value for value in problem.candidates(every) if problem.fits(problem.everywhere(value, every))]
    found = global_thresholds(problem)
    if not fitting:
        assert found is None
    else:
        assert found.tolist() == [min(fitting)] * (problem.observed.exits - 1)


@settings(max_examples=40)
@given(problems())
def test_per_exit_thresholds_keep_the_budget_and_answer_no_worse(problem: Problem) -> None:
    found = search(problem)
    if found is None:
        assert not problem.fits(everyone_first(problem))
        return
    common, thresholds = found
    assert problem.fits(common)
    assert problem.fits(thresholds)
    assert problem.quality(thresholds) >= problem.quality(common)
    assert thresholds.dtype == np.float32


@settings(max_examples=40)
@given(problems())
def test_the_curve_rises_in_thresholds_and_holds_the_common_point(problem: Problem) -> None:
    found = global_thresholds(problem)
    if found is None:
        return
    points = curve(problem, found)
    thresholds = [point.threshold for point in points]
    assert thresholds == sorted(set(thresholds))
    assert float(found[0]) in thresholds
    spent = [problem.budget.of(point.simulated.costs) for point in points]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(spent))


def two_kinds_of_rows() -> tuple[Observed, SegmentCosts]:
    """Half the rows are right at once; of the others the second exit is wrong, and more certain. Three exits."""
    entropy = np.float32([[0.3, 0.1, 0.1]] * 60 + [[0.9, 0.2, 0.1]] * 60)
    entropy += np.random.default_rng(0).random(entropy.shape).astype(np.float32) / 50
    good = np.array([[True, True, True]] * 60 + [[False, False, True]] * 60)
    observed = Observed(entropy, good, np.zeros(120, int), 1, "<=")
    table = np.zeros((3, 2, 1))
    table[:, 1] = 1.0
    return observed, SegmentCosts(table, table)


def test_an_exit_that_answers_worse_is_closed() -> None:
    observed, costs = two_kinds_of_rows()
    problem = Problem(observed, costs, ExitBudget("mean_flops", 2.0), CLASSES)
    found = search(problem)
    assert found is not None
    common, thresholds = found
    # One threshold for all lets every row go at the second exit, where half would yet become right.
    assert problem.observed.histogram(problem.observed.leaving(common)) == (0, 120, 0)
    assert problem.quality(common) == 0.5
    assert problem.quality(thresholds) == 1.0
    assert thresholds[1] < 0
    assert 0.32 < thresholds[0] < 0.9
    assert problem.cost(thresholds) == 2.0


def test_a_chance_win_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    entropy = rng.random((80, 3)).astype(np.float32)
    good = np.ones((80, 3), bool)
    good[0, 0] = False  # leaves first whatever the common threshold; a move could win this one row
    entropy[0, 0] = 0.0
    table = np.zeros((3, 2, 1))
    table[:, 1] = 1.0
    problem = Problem(
        Observed(entropy, good, np.zeros(80, int), 1, "<="), SegmentCosts(table, table), ExitBudget("mean_flops", 2), 3
    )
    found = search(problem)
    assert found is not None
    common, thresholds = found
    assert np.array_equal(common, thresholds)


def test_noise_is_hardly_ever_learnt() -> None:
    """Right or wrong by coin: no thresholds are better than others, so nearly every search must stay where it began."""
    table = np.zeros((5, 2, 1))
    table[:, 1] = 1.0
    moved = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        entropy, good = rng.random((600, 5)).astype(np.float32), rng.random((600, 5)) < 0.7
        observed = Observed(entropy, good, np.zeros(600, int), 1, "<=")
        found = search(Problem(observed, SegmentCosts(table, table), ExitBudget("mean_flops", 3.0), CLASSES))
        assert found is not None
        moved += not np.array_equal(*found)
    assert moved <= 2


def test_full_depth_within_the_budget_closes_every_exit() -> None:
    observed, costs = two_kinds_of_rows()
    found = search(Problem(observed, costs, ExitBudget("mean_flops", 3.0), CLASSES))
    assert found[1].tolist() == [CLOSED, CLOSED]


def test_out_of_reach() -> None:
    observed, costs = two_kinds_of_rows()
    problem = Problem(observed, costs, ExitBudget("mean_latency_ms", 0.9), CLASSES)
    assert search(problem) is None
    assert problem.cost(everyone_first(problem)) == 1.0
