import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.errors import InputError
from nestforge.runtime.calibrate.simulate import (
    CLOSED,
    METRICS,
    ExitBudget,
    Observed,
    SegmentCosts,
    batch_max,
    latency_figure,
    monotone,
    parse_budget,
    thresholds_between,
)
from nestforge.runtime.exits.policy import Costs, ExitPolicy
from nestforge.runtime.inputs.arrays import Array

COSTS = Costs(mean_flops=1e6, mean_latency_ms=1.0, p50_latency_ms=2.0, p95_latency_ms=3.0, p99_latency_ms=4.0)


@pytest.mark.parametrize(
    ("text", "budget", "figure"),
    [
        ("mean_latency_ms<=5", ExitBudget("mean_latency_ms", 5.0), 1.0),
        (" p95_latency_ms <= 2.5 ", ExitBudget("p95_latency_ms", 2.5), 3.0),
        ("mean_flops<=7.6e8", ExitBudget("mean_flops", 7.6e8), 1e6),
        ("mean_latency_ms<=50 %", ExitBudget("mean_latency_ms", 50.0, is_share=True), 1.0),
        ("p99_latency_ms<=12.5%", ExitBudget("p99_latency_ms", 12.5, is_share=True), 4.0),
        (" mean_flops <= 100 % ", ExitBudget("mean_flops", 100.0, is_share=True), 1e6),
    ],
)
def test_budgets_are_read(text: str, budget: ExitBudget, figure: float) -> None:
    assert parse_budget(text) == budget
    assert parse_budget(str(budget)) == budget
    assert budget.of(COSTS) == figure


def test_no_digit_of_a_limit_is_lost() -> None:
    assert str(parse_budget("mean_flops<=123456789")) == "mean_flops<=123456789"


def test_a_share_is_of_the_whole_engines_figure() -> None:
    share = parse_budget("mean_latency_ms<=40 %")
    assert str(share) == "mean_latency_ms<=40%"
    assert share.resolved(12.5) == ExitBudget("mean_latency_ms", 5.0)
    assert share.resolved(12.5).resolved(100.0) == ExitBudget("mean_latency_ms", 5.0), "what is resolved stays"
    assert share.shown(40.5) == "40.5 % of the whole engine's"


def test_every_metric_has_a_unit() -> None:
    assert [ExitBudget(metric, 1.0).shown(1.5).split()[1] for metric in METRICS] == ["ms"] * 4 + ["FLOPs"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mean_latency_ms<5", "budget 'mean_latency_ms<5': expected METRIC<=NUMBER, such as mean_latency_ms<=5"),
        ("mean_latency<=5", "unknown metric 'mean_latency'; did you mean 'mean_latency_ms'?"),
        ("mean_flops<=many", "'many' is not a number"),
        ("mean_flops<=many %", "'many' is not a number"),
        ("mean_flops<=5%%", "'5%' is not a number"),
        ("mean_flops<=%", "'%' is not a number"),
        ("mean_flops<=0 %", "budget mean_flops: expected a positive number, got 0.0"),
        ("mean_flops<=100.5 %", "budget 'mean_flops<=100.5 %': expected at most 100 % of the whole engine's figure"),
        ("mean_latency_ms<5", "or a share of the whole engine's figure, such as mean_latency_ms<=50%"),
        ("mean_flops<=-1", "budget mean_flops: expected a positive number, got -1.0"),
        ("mean_flops<=nan", "expected a positive number, got nan"),
        ("", "expected METRIC<=NUMBER"),
    ],
)
def test_other_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as failure:
        parse_budget(text)
    assert message in str(failure.value)


CLASSES = 3


@st.composite
def problems(draw: st.DrawFn) -> tuple[Observed, SegmentCosts]:
    """A few rows with coarse entropies, so that ties are common; costs that rise with rows and lengths."""
    rows, exits, batch = draw(st.integers(1, 12)), draw(st.integers(2, 4)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    entropy = (rng.integers(0, 9, (rows, exits)) / 8).astype(np.float32)
    entropy[rng.random((rows, exits)) < 0.05] = np.nan
    observed = Observed(
        entropy, rng.random((rows, exits)) < 0.6, rng.integers(0, 2, rows), batch, draw(st.sampled_from(["<", "<="]))
    )
    steps = rng.integers(1, 9, (exits, batch + 1, 2)).astype(float)
    steps[:, 0] = 0
    table = steps.cumsum(axis=1).cumsum(axis=2)
    return observed, SegmentCosts(table, 100 * table)


def walked(observed: Observed, costs: SegmentCosts, thresholds: Array) -> tuple[list[int], list[float], list[float]]:
    """Exit of every row, and milliseconds and FLOPs of every request, one request and one row after the other."""
    policy = ExitPolicy(tuple(map(float, thresholds)), observed.compare)
    index = [-1] * observed.rows
    times, flops = [], []
    for start in range(0, observed.rows, observed.batch):
        live = list(range(start, min(start + observed.batch, observed.rows)))
        took = work = 0.0
        for exit_ in range(observed.exits):
            if not live:
                break
            longest = max(int(observed.length_class[row]) for row in live)
            took += float(costs.milliseconds[exit_, len(live), longest])
            work += float(costs.flops[exit_, len(live), longest])
            staying = []
            for row in live:
                is_last = exit_ == observed.exits - 1
                if is_last or policy.leavers(exit_, [float(observed.gate[row, exit_])])[0]:
                    index[row] = exit_
                else:
                    staying.append(row)
            live = staying
        times.append(took)
        flops.append(work)
    return index, times, flops


@given(problems(), st.integers(0, 2**32 - 1))
def test_simulation_equals_walking_row_by_row(problem: tuple[Observed, SegmentCosts], seed: int) -> None:
    observed, costs = problem
    thresholds = (np.random.default_rng(seed).integers(-1, 10, observed.exits - 1) / 8).astype(np.float32)
    expected, times, flops = walked(observed, costs, thresholds)
    index = observed.leaving(thresholds)
    assert index.tolist() == expected
    whole = observed.rows // observed.batch
    assert observed.request_ms(index, costs).tolist() == times[:whole]
    assert observed.metric(index, costs, "mean_flops") == pytest.approx(sum(flops) / observed.rows)
    assert observed.histogram(index) == tuple(expected.count(exit_) for exit_ in range(observed.exits))
    assert observed.quality(index) == np.mean([observed.good[row, exit_] for row, exit_ in enumerate(expected)])
    if whole:
        figures = observed.figures(index, costs)
        assert figures.costs.mean_latency_ms == pytest.approx(np.mean(times[:whole]))
        assert figures.costs.p95_latency_ms == observed.metric(index, costs, "p95_latency_ms")


@given(problems(), st.sampled_from(["mean_flops", "mean_latency_ms", "p50_latency_ms", "p99_latency_ms"]))
def test_cost_never_rises_with_the_threshold(problem: tuple[Observed, SegmentCosts], metric: str) -> None:
    observed, costs = problem
    if observed.rows < observed.batch:
        return
    every = thresholds_between(observed.gate[:, :-1], observed.compare, CLASSES)
    spent = [observed.metric(observed.leaving(np.full(observed.exits - 1, value)), costs, metric) for value in every]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(spent))


@given(problems())
def test_the_extremes(problem: tuple[Observed, SegmentCosts]) -> None:
    observed, _ = problem
    thresholds = thresholds_between(observed.gate, observed.compare, CLASSES)
    assert thresholds[0] == CLOSED < 0
    assert thresholds[-1] > math.log(CLASSES)
    assert (observed.leaving(np.full(observed.exits - 1, thresholds[0])) == observed.exits - 1).all()
    first = observed.leaving(np.full(observed.exits - 1, thresholds[-1]))
    assert (first[np.isfinite(observed.gate[:, 0])] == 0).all()
    assert (first[np.isnan(observed.gate).all(axis=1)] == observed.exits - 1).all()


@pytest.mark.parametrize("compare", ["<", "<="])
def test_thresholds_part_every_pair_of_neighbours(compare: str) -> None:
    near = np.nextafter(np.float32(0.5), np.float32(1))
    entropies = np.float32([0.25, 0.5, near, 0.75, np.nan, 0.5])
    thresholds = thresholds_between(entropies, compare, CLASSES)
    admitted = [sum(ExitPolicy((float(value),), compare).leavers(0, entropies.tolist())) for value in thresholds]
    assert admitted == [0, 1, 3, 4, 5]
    assert thresholds[1] == 0.375
    assert thresholds.dtype == np.float32


def test_without_entropies_there_are_the_extremes() -> None:
    assert thresholds_between(np.float32([np.nan]), "<=", 2).tolist() == [-1.0, pytest.approx(math.log(2))]


def test_batch_max_holds_a_request_together() -> None:
    entropy = np.float32([[0.1, 0.5], [0.3, 0.2], [0.4, np.nan], [0.2, 0.1], [0.7, 0.6]])
    found = batch_max(entropy, 2)
    expected = np.float32([[0.3, 0.5], [0.3, 0.5], [0.4, np.nan], [0.4, np.nan], [0.7, 0.6]])
    assert np.array_equal(found, expected, equal_nan=True)


@given(st.integers(0, 2**32 - 1))
def test_monotone_tables_stay_and_others_become_it(seed: int) -> None:
    table = np.random.default_rng(seed).integers(0, 9, (2, 4, 3)).astype(float)
    smooth = monotone(table)
    assert (np.diff(smooth, axis=1) >= 0).all()
    assert (np.diff(smooth, axis=2) >= 0).all()
    assert np.array_equal(monotone(smooth), smooth)
    assert smooth.min() >= table.min()
    assert smooth.max() <= table.max()


def test_latency_figures() -> None:
    times = np.array([[1.0, 2.0, 6.0], [2.0, 2.0, 2.0]])
    assert latency_figure(times, "mean_latency_ms").tolist() == [3.0, 2.0]
    assert latency_figure(times, "p50_latency_ms").tolist() == [2.0, 2.0]
