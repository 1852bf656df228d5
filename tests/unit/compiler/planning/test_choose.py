"""Of rungs made by hand; what is chosen of real ladders is in test_plan.py."""

from __future__ import annotations

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import Limits
from nestforge.compiler.planning.candidate import BucketCost, Candidate
from nestforge.compiler.planning.choose import Rejection, choose
from nestforge.errors import PlanError
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.load_profile import load_profile

PROFILE = load_profile("raspberry-pi-5")


def rung(place: int, parameters: int, memory_mb: float = 1.0) -> Candidate:
    cost = BucketCost(Bucket(1, 8), parameters, parameters, 0, float(parameters))
    figures = (parameters, 4 * parameters, 4 * parameters, memory_mb, (cost,), cost, parameters, parameters)
    return Candidate(f"ffn{parameters}", (), {"ffn": (parameters,)}, *figures, rung=place)


RUNGS = [rung(place, parameters) for place, parameters in enumerate((10, 20, 30))]


def test_the_largest_rung_that_keeps_every_limit_and_why_not_the_next() -> None:
    plan = choose("small", BudgetSpec(parameters=25), RUNGS, PROFILE, "predicted")
    assert (plan.name, plan.submodel, plan.limits) == ("small", "ffn20", Limits(parameters=25))
    assert plan.reason == (
        "rung 2 of 3 is the largest that keeps parameters 20 of 25; in the next, ffn30, parameters 30 exceeds 25 by 5"
    )
    assert plan.rejected == (Rejection("ffn30", "parameters 30 exceeds 25 by 5"),)


def test_a_limit_is_kept_where_it_is_met() -> None:
    assert choose("exact", BudgetSpec(parameters=20), RUNGS, PROFILE, "predicted").submodel == "ffn20"


def test_the_memory_of_the_device_limits_too() -> None:
    device = PROFILE.memory_mb
    rungs = [rung(0, 10, device), rung(1, 20, device + 1)]
    plan = choose("any", BudgetSpec(), rungs, PROFILE, "predicted")
    assert plan.submodel == "ffn10"
    assert plan.reason.startswith("rung 1 of 2 is the largest that keeps the memory of the device; in the next, ffn20")


def test_without_a_rung_that_fits_the_smallest_is_named() -> None:
    with pytest.raises(PlanError, match=r"budget 'tiny': not even the smallest submodel ffn10 fits: parameters 10"):
        choose("tiny", BudgetSpec(parameters=5), RUNGS, PROFILE, "predicted")
