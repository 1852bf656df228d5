"""A budget: what a submodel may cost on a device, in absolute figures or in shares of the universal model's."""

import dataclasses
import re
from dataclasses import dataclass
from decimal import Decimal

from ..errors import ProfileError
from ..strict import structure

_SHARE_PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?%")
_COUNT_PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?([KMGB])")
_COUNT_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


@dataclass(frozen=True)
class BudgetSpec:
    """Limits of one budget; ``None`` is no limit, ``"50 %"`` is a share of the universal model's own figure.

    Parameters and FLOPs may be written ``"94.4M"``, with K, M, or G or B for 10^9. Parameters are all, all but the
    tables of tokens and positions, or those of the feed-forward networks that shrink. Latency and FLOPs are judged at
    the profile's ``budget_shape``. An ``optional`` budget is left out, and a note says so, for a
    model without a submodel that keeps it.
    """

    latency_ms: float | str | None = None
    memory_mb: float | str | None = None
    parameters: int | str | None = None
    flops: int | str | None = None
    non_embedding_parameters: int | str | None = None
    ffn_parameters: int | str | None = None
    optional: bool = False


# Figures that a budget may limit.
LIMITS = tuple(each.name for each in dataclasses.fields(BudgetSpec) if each.name != "optional")


def parse_budget(text: str) -> tuple[str, BudgetSpec]:
    """Reads ``METRIC<=X``, or several with commas between, as a budget whose name is the text itself.

    The metrics are the fields of BudgetSpec. Raises ProfileError for anything else.
    """
    where = f"budget {text[:80]!r}"
    limits: dict[str, float | str] = {}
    for part in text.split(","):
        metric, sign, value = (word.strip() for word in part.partition("<="))
        if not sign or not metric or not value or metric in limits:
            raise ProfileError(f"{where}: expected METRIC<=X, such as ffn_parameters<=94.4M or latency_ms<=50 %")
        limits[metric] = _number(value)
    budget = structure(BudgetSpec, limits, where, ProfileError)
    check_budget(budget, where)
    return "".join(text.split()), budget


def resolve_limit(limit: float | str | None, universal: float) -> float | None:
    """A limit in absolute units, given the universal model's own figure."""
    if not isinstance(limit, str):
        return limit
    if count := _COUNT_PATTERN.fullmatch(limit):
        return float(Decimal(count[1]) * _COUNT_UNITS[count[2]])
    return float(limit[:-1]) / 100 * universal


def check_budget(budget: BudgetSpec, where: str) -> None:
    """Raises ProfileError, from ``where``, for a limit that no submodel can have."""
    for limit in LIMITS:
        counts = not limit.endswith(("_ms", "_mb"))
        _check_limit(f"{where}: {limit}", getattr(budget, limit), counts)


def _check_limit(where: str, limit: float | str | None, counts: bool) -> None:
    """``counts``: the figure is a number of things, which may be written in thousands, millions or billions."""
    if not isinstance(limit, str):
        require_positive(where, limit)
        return
    share, count = _SHARE_PATTERN.fullmatch(limit), _COUNT_PATTERN.fullmatch(limit) if counts else None
    number = Decimal(count[1]) if count else Decimal(share[1]) if share else Decimal(0)
    if not number or (share and number > 100):
        plain = "number, such as 94.4M," if counts else "number"
        raise ProfileError(f'{where}: expected a positive {plain} or a share such as "50 %", got {limit!r:.80}')


def require_positive(where: str, value: float | None) -> None:
    """Raises ProfileError, from ``where``, for a figure of 0 or below."""
    if value is not None and not value > 0:
        raise ProfileError(f"{where}: expected more than 0, got {value:g}")


def _number(text: str) -> float | str:
    """A plain number as one; anything else as it stands."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
