from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.compiler.parity import Tolerance, compare, judged, max_difference, tolerance_for, within
from nestforge.profiles.precision import PRECISIONS
from nestforge.runtime.manifest import TensorSpec
from polygraphy.comparator import IterationResult, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

ANY_ANGLE = -2.0  # no cosine lies below, so the rule per element decides alone


@pytest.fixture(autouse=True)
def quiet_polygraphy() -> None:
    G_LOGGER.module_severity = G_LOGGER.CRITICAL


def polygraphy_passes(reference: np.ndarray, found: np.ndarray, atol: float, rtol: float) -> bool:
    """NVIDIA's comparator: per element ``abs <= atol OR abs / |reference| <= rtol``."""
    results = [
        IterationResult({"o": array.astype(np.float64)}, runner_name=str(i))
        for i, array in enumerate((found, reference))
    ]
    return bool(SimpleCompareFunc(atol=atol, rtol=rtol)(*results)["o"])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Reference and found values: sizes over six decades, errors from far below to far above any tolerance."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.sampled_from([(1,), (7,), (2, 3), (2, 4, 5)]))
    reference = rng.standard_normal(shape) * 10 ** rng.uniform(-4, 2, shape)
    error = 10.0 ** draw(st.floats(-9, 1)) * rng.standard_normal(shape) * (rng.random(shape) < draw(st.floats(0, 1)))
    return reference, reference + error * (np.abs(reference) if draw(st.booleans()) else 1.0)


def scale_of(reference: np.ndarray) -> float:
    return max(1.0, float(np.sqrt(np.mean(reference * reference))))


@given(pairs(), st.sampled_from([1e-7, 1e-5, 1e-3, 1e-1]))
def test_an_absolute_limit_alone_is_polygraphys(pair: tuple[np.ndarray, np.ndarray], atol: float) -> None:
    """With one of the two terms zero, "abs + rel" and "abs or rel" are one rule: both verdicts must agree."""
    reference, found = pair
    ours = within(reference, found, Tolerance(atol, 0.0, ANY_ANGLE))
    assert ours == polygraphy_passes(reference, found, atol * scale_of(reference), 0.0)


@given(pairs(), st.sampled_from([1e-7, 1e-5, 1e-3, 1e-1]))
def test_a_relative_limit_alone_is_polygraphys(pair: tuple[np.ndarray, np.ndarray], rtol: float) -> None:
    reference, found = pair
    assert within(reference, found, Tolerance(0.0, rtol, ANY_ANGLE)) == polygraphy_passes(reference, found, 0.0, rtol)


@given(pairs(), st.floats(-8, 0), st.floats(-8, 0))
def test_with_both_limits_the_rule_lies_between_two_of_polygraphys(
    pair: tuple[np.ndarray, np.ndarray], log_atol: float, log_rtol: float
) -> None:
    """What "abs or rel" accepts "abs + rel" accepts too; what that accepts, "abs or rel" does with both doubled."""
    (reference, found), atol, rtol = pair, 10**log_atol, 10**log_rtol
    ours = within(reference, found, Tolerance(atol, rtol, ANY_ANGLE))
    if polygraphy_passes(reference, found, atol * scale_of(reference), rtol):
        assert ours
    if ours:
        assert polygraphy_passes(reference, found, 2 * atol * scale_of(reference), 2 * rtol)


@given(pairs(), st.floats(-8, 0), st.floats(1, 10))
def test_a_wider_limit_never_fails_what_a_tighter_one_passes(
    pair: tuple[np.ndarray, np.ndarray], log_atol: float, factor: float
) -> None:
    reference, found = pair
    tight = Tolerance(10**log_atol, 10**log_atol, 0.99)
    wide = Tolerance(factor * tight.atol, factor * tight.rtol, 0.98)
    assert within(reference, found, wide) or not within(reference, found, tight)


@given(pairs())
def test_a_value_equals_itself(pair: tuple[np.ndarray, np.ndarray]) -> None:
    assert within(pair[0], pair[0], Tolerance(0.0, 0.0, 1 - 1e-12))


def test_the_limit_by_hand() -> None:
    reference = np.array([3.0, 4.0])  # rms sqrt(12.5) = 3.5355
    limit = Tolerance(1e-3, 1e-2, ANY_ANGLE)
    allowed = 1e-3 * 12.5**0.5 + 1e-2 * 4.0
    assert within(reference, np.array([3.0, 4.0 + 0.999 * allowed]), limit)
    assert not within(reference, np.array([3.0, 4.0 + 1.001 * allowed]), limit)
    small = np.array([1e-3, 0.0])  # below 1 the scale stays 1
    assert within(small, np.array([1e-3, 0.999e-3]), limit)
    assert not within(small, np.array([1e-3, 1.001e-3]), limit)


def test_one_broken_element_among_a_million_fails() -> None:
    reference = np.ones(10**6, np.float32)
    found = reference.copy()
    found[777] += 1e-3
    assert not within(reference, found, tolerance_for("fp32", 1))


def test_a_wrong_direction_fails_though_every_element_is_near() -> None:
    reference, found = np.full(8, 1e-5), np.full(8, -1e-5)
    assert within(reference, found, Tolerance(1e-4, 0.0, ANY_ANGLE))
    assert not within(reference, found, Tolerance(1e-4, 0.0, 0.999))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sides", ["reference", "found", "both"])
def test_what_is_not_finite_fails_even_where_both_sides_agree(bad: float, sides: str) -> None:
    arrays = {name: np.ones((2, 3), np.float32) for name in ("reference", "found")}
    for name in arrays if sides == "both" else [sides]:
        arrays[name][1, 2] = bad
    (verdict,) = compare([{"o": arrays["reference"]}], [{"o": arrays["found"]}], ["text"], tolerance_for("fp32", 1))
    assert not verdict
    assert verdict.describe() == "output o, case text: max abs inf, max rel inf, cosine -1.0000000"


def test_another_shape_fails_even_where_it_would_broadcast() -> None:
    (verdict,) = compare([{"o": np.ones((2, 3))}], [{"o": np.ones((1, 3))}], ["c"], Tolerance(1, 1, ANY_ANGLE))
    assert not verdict
    assert verdict.output.max_abs == float("inf")


def test_zeros_equal_zeros_and_nothing_else() -> None:
    zero, limit = np.zeros(4, np.float32), tolerance_for("fp32", 1)
    assert within(zero, zero, limit)
    assert not within(zero, np.array([0, 0, 0, 1e-6], np.float32), limit), "no direction equals none"


def test_values_near_the_end_of_float32_do_not_overflow() -> None:
    huge = np.full((2, 3), 3e38, np.float32)
    assert within(huge, huge, tolerance_for("fp32", 1))
    assert not within(huge, -huge, tolerance_for("fp32", 1))


def test_worst_figures_over_all_cases_and_the_first_broken_case() -> None:
    reference = [{"a": np.ones(2), "b": np.ones(2)} for _ in range(3)]
    found = [{"a": np.ones(2) + e, "b": np.ones(2)} for e in (0.001, 0.5, 0.25)]
    loose = compare(reference, found, ["x", "y", "z"], Tolerance(1.0, 0.0, ANY_ANGLE))
    assert [verdict.output.name for verdict in loose] == ["a", "b"]
    assert (loose[0].output.max_abs, loose[0].output.max_rel) == (0.5, 0.5)
    a, b = compare(reference, found, ["x", "y", "z"], Tolerance(0.1, 0.0, ANY_ANGLE))
    assert (bool(a), a.failed_case, a.output.max_abs) == (False, "y", 0.5)
    assert (bool(b), b.failed_case) == (True, None)


def test_tolerance_grows_with_depth_and_the_rule_says_so() -> None:
    one, twelve = tolerance_for("fp32", 1), tolerance_for("fp32", 12)
    assert (twelve.atol, twelve.rtol) == pytest.approx((12 * one.atol, 12 * one.rtol))
    assert twelve.min_cosine == one.min_cosine
    assert twelve.rule == "abs <= 4.8e-05 * max(1, rms) + 0.00012 * |reference| per element, and cosine >= 0.999999"


def test_the_largest_difference_over_outputs_and_cases() -> None:
    left = [{"a": np.array([1.0, 2.0]), "b": np.array([0.0])}, {"a": np.array([0.0, 0.0]), "b": np.array([5.0])}]
    right = [{"a": np.array([1.0, 2.5]), "b": np.array([0.0])}, {"a": np.array([0.0, 0.0]), "b": np.array([3.0])}]
    assert max_difference(left, right) == 2.0
    assert max_difference(left, left) == 0.0


OUTPUTS = (TensorSpec("hidden", "float32", ("batch", "sequence", 2)), TensorSpec("pooled", "float32", ("batch", 2)))


def test_integers_are_judged_where_positions_count() -> None:
    mask = np.array([[1, 1, 0]])
    arrays = {"hidden": np.ones((1, 3, 2), np.float32), "pooled": np.ones((1, 2), np.float32)}
    for precision in ("int8", "int8-dynamic", "int4"):
        found = judged(arrays, OUTPUTS, precision, mask)
        assert found["hidden"].sum(axis=-1).tolist() == [[2, 2, 0]]
        assert found["pooled"] is arrays["pooled"]
    for precision in ("fp32", "fp16", "bf16"):
        assert judged(arrays, OUTPUTS, precision, mask) is arrays, "rounding explains every position"
    assert judged(arrays, OUTPUTS, "int8", None) is arrays


def test_every_precision_has_a_tolerance_and_narrower_ones_are_wider() -> None:
    limits = {precision: tolerance_for(precision, 6) for precision in PRECISIONS}
    assert limits["fp32"].atol < limits["fp16"].atol < limits["bf16"].atol < limits["int8"].atol < limits["int4"].atol
    assert limits["int8"].min_cosine > limits["int4"].min_cosine
