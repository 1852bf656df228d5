import pytest
from nestforge.errors import ProfileError
from nestforge.profiles.budget import BudgetSpec, parse_budget, resolve_limit


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, None),
        (3.0, 3.0),
        (7, 7),
        ("50 %", 100.0),
        ("12.5%", 25.0),
        ("100 %", 200.0),
        ("226.5M", 226_500_000),
        ("1.1 K", 1100),
        ("2G", 2e9),
        ("2B", 2e9),
    ],
)
def test_resolve_limit(limit: float | str | None, expected: float | None) -> None:
    assert resolve_limit(limit, 200.0) == expected


@pytest.mark.parametrize(
    ("text", "name", "budget"),
    [
        ("ffn_parameters<=94.4M", "ffn_parameters<=94.4M", BudgetSpec(ffn_parameters="94.4M")),
        ("parameters <= 1000", "parameters<=1000", BudgetSpec(parameters=1000)),
        (
            "latency_ms<=50 %, memory_mb<=12.5",
            "latency_ms<=50%,memory_mb<=12.5",
            BudgetSpec(latency_ms="50 %", memory_mb=12.5),
        ),
    ],
)
def test_budgets_on_the_command_line(text: str, name: str, budget: BudgetSpec) -> None:
    assert parse_budget(text) == (name, budget)


FORM = "expected METRIC<=X, such as ffn_parameters<=94.4M or latency_ms<=50 %"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"budget '': {FORM}"),
        ("flops", f"budget 'flops': {FORM}"),
        ("flops<=", f"budget 'flops<=': {FORM}"),
        ("flops<=1M,", f"budget 'flops<=1M,': {FORM}"),
        ("flops<=1,flops<=2", f"budget 'flops<=1,flops<=2': {FORM}"),
        ("ffn<=1", "budget 'ffn<=1': unknown key 'ffn'; expected one of "),
        ("latency_ms<=-1", "budget 'latency_ms<=-1': latency_ms: expected more than 0, got -1"),
        ("latency_ms<=nan", "budget 'latency_ms<=nan': latency_ms: expected a finite number, got nan"),
        ("parameters<=0.5", "budget 'parameters<=0.5': parameters: expected a whole number, got float 0.5"),
        (
            "latency_ms<=5M",
            "budget 'latency_ms<=5M': latency_ms: expected a positive number or a share such as \"50 %\", got '5M'",
        ),
    ],
)
def test_budgets_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ProfileError) as failure:
        parse_budget(text)
    assert str(failure.value).startswith(message)
