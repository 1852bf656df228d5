from __future__ import annotations

import pytest
from nestforge.errors import SelectionError
from nestforge.runtime.calibrate.budget import METRICS, ExitBudget, parse_budget
from nestforge.runtime.exits.calibration import Costs

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
    with pytest.raises(SelectionError) as failure:
        parse_budget(text)
    assert message in str(failure.value)
