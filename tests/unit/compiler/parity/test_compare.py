from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.compiler.parity.compare import (
    Rounding,
    Tolerance,
    compare,
    counted,
    explainable,
    max_difference,
    rounding,
    tolerance_for,
    unprovable,
    with_rounding,
    within,
)
from nestforge.profiles.precision import PRECISIONS, Precision
from polygraphy.comparator import IterationResult, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

ANY_ANGLE = -np.inf  # no cosine lies below and no size is refused, so the rule per element decides alone


def limits(atol: float, rtol: float, min_cosine: float, rms: float = float("inf")) -> Tolerance:
    """Without a limit on the rms unless there is one to be tested."""
    return Tolerance(atol, rtol, min_cosine, rms)


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
    shape = draw(st.sampled_from([(1,), (7,), (2, 3), (60,), (1, 4, 5)]))
    reference = rng.standard_normal(shape) * 10 ** rng.uniform(-4, 2, shape)
    error = 10.0 ** draw(st.floats(-9, 1)) * rng.standard_normal(shape) * (rng.random(shape) < draw(st.floats(0, 1)))
    return reference, reference + error * (np.abs(reference) if draw(st.booleans()) else 1.0)


def scale_of(reference: np.ndarray) -> float:
    """Scale of one part: its rms, at least 1 where so few numbers may all be small by chance."""
    return max(1.0 if reference.size < 16 else 0.0, float(np.sqrt(np.mean(reference * reference))))


@given(pairs(), st.sampled_from([1e-7, 1e-5, 1e-3, 1e-1]))
def test_an_absolute_limit_alone_is_polygraphys(pair: tuple[np.ndarray, np.ndarray], atol: float) -> None:
    """With one of the two terms zero, "abs + rel" and "abs or rel" are one rule: both verdicts must agree."""
    reference, found = pair
    ours = within(reference, found, limits(atol, 0.0, ANY_ANGLE))
    assert ours == polygraphy_passes(reference, found, atol * scale_of(reference), 0.0)


@given(pairs(), st.sampled_from([1e-7, 1e-5, 1e-3, 1e-1]))
def test_a_relative_limit_alone_is_polygraphys(pair: tuple[np.ndarray, np.ndarray], rtol: float) -> None:
    reference, found = pair
    assert within(reference, found, limits(0.0, rtol, ANY_ANGLE)) == polygraphy_passes(reference, found, 0.0, rtol)


@given(pairs(), st.floats(-8, 0), st.floats(-8, 0))
def test_with_both_limits_the_rule_lies_between_two_of_polygraphys(
    pair: tuple[np.ndarray, np.ndarray], log_atol: float, log_rtol: float
) -> None:
    """ "abs + rel" accepts all that "abs or rel" does; all that it accepts, "abs or rel" does with both doubled."""
    (reference, found), atol, rtol = pair, 10**log_atol, 10**log_rtol
    ours = within(reference, found, limits(atol, rtol, ANY_ANGLE))
    if polygraphy_passes(reference, found, atol * scale_of(reference), rtol):
        assert ours
    if ours:
        assert polygraphy_passes(reference, found, 2 * atol * scale_of(reference), 2 * rtol)


@given(pairs(), st.floats(-8, 0), st.floats(1, 10))
def test_a_wider_limit_never_fails_what_a_tighter_one_passes(
    pair: tuple[np.ndarray, np.ndarray], log_atol: float, factor: float
) -> None:
    reference, found = pair
    tight = limits(10**log_atol, 10**log_atol, 0.99)
    wide = limits(factor * tight.atol, factor * tight.rtol, 0.98)
    assert within(reference, found, wide) or not within(reference, found, tight)


@given(pairs())
def test_a_value_equals_itself(pair: tuple[np.ndarray, np.ndarray]) -> None:
    assert within(pair[0], pair[0], limits(0.0, 0.0, 1 - 1e-12))


def test_the_limit_by_hand() -> None:
    reference = np.array([3.0, 4.0])  # rms sqrt(12.5) = 3.5355
    limit = limits(1e-3, 1e-2, ANY_ANGLE)
    allowed = 1e-3 * 12.5**0.5 + 1e-2 * 4.0
    assert within(reference, np.array([3.0, 4.0 + 0.999 * allowed]), limit)
    assert not within(reference, np.array([3.0, 4.0 + 1.001 * allowed]), limit)
    small = np.array([1e-3, 0.0])  # of so few numbers the scale is 1 at least
    assert within(small, np.array([1e-3, 0.999e-3]), limit)
    assert not within(small, np.array([1e-3, 1.001e-3]), limit)


def test_one_broken_element_among_a_million_fails() -> None:
    reference = np.ones(10**6, np.float32)
    found = reference.copy()
    found[777] += 1e-3
    assert not within(reference, found, tolerance_for("fp32", 1))


def test_a_wrong_direction_fails_though_every_element_is_near() -> None:
    reference, found = np.full(8, 1e-5), np.full(8, -1e-5)
    assert within(reference, found, limits(1e-4, 0.0, ANY_ANGLE))
    assert not within(reference, found, limits(1e-4, 0.0, 0.999))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sides", ["reference", "found", "both"])
def test_what_is_not_finite_fails_even_where_both_sides_agree(bad: float, sides: str) -> None:
    arrays = {name: np.ones((2, 3), np.float32) for name in ("reference", "found")}
    for name in arrays if sides == "both" else [sides]:
        arrays[name][1, 2] = bad
    (verdict,) = compare([{"o": arrays["reference"]}], [{"o": arrays["found"]}], ["text"], tolerance_for("fp32", 1))
    assert not verdict
    whose = "expected " if sides == "reference" else ""
    assert verdict.describe() == f"output o, case text: 1 of 6 {whose}numbers are NaN or infinite"


def test_another_shape_fails_even_where_it_would_broadcast() -> None:
    (verdict,) = compare([{"o": np.ones((2, 3))}], [{"o": np.ones((1, 3))}], ["c"], limits(1, 1, ANY_ANGLE))
    assert not verdict
    assert verdict.output.max_abs == float("inf")
    assert verdict.describe() == "output o, case c: shape [1, 3], expected [2, 3]"


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
    loose = compare(reference, found, ["x", "y", "z"], limits(1.0, 0.0, ANY_ANGLE))
    assert [verdict.output.name for verdict in loose] == ["a", "b"]
    assert (loose[0].output.max_abs, loose[0].output.max_rel) == (0.5, 0.5)
    a, b = compare(reference, found, ["x", "y", "z"], limits(0.1, 0.0, ANY_ANGLE))
    assert (bool(a), a.failed_case, a.output.max_abs) == (False, "y", 0.5)
    assert (bool(b), b.failed_case) == (True, None)


def test_tolerance_grows_with_depth_and_the_rule_says_so() -> None:
    one, twelve = tolerance_for("fp32", 1), tolerance_for("fp32", 12)
    assert (twelve.atol, twelve.rtol, twelve.rms) == pytest.approx((12 * one.atol, 12 * one.rtol, 12 * one.rms))
    assert twelve.min_cosine == one.min_cosine
    assert twelve.rule == (
        "abs <= 4.8e-05 * rms + 0.00012 * |reference| per element, rms of it <= 4.8e-06 * rms, cosine >= 0.999999, "
        "and sizes of rows within 0.00141, each wider by 4 times what PyTorch's own float32 is off by there beyond "
        "half of it"
    )


def test_the_largest_difference_over_outputs_and_cases() -> None:
    left = [{"a": np.array([1.0, 2.0]), "b": np.array([0.0])}, {"a": np.array([0.0, 0.0]), "b": np.array([5.0])}]
    right = [{"a": np.array([1.0, 2.5]), "b": np.array([0.0])}, {"a": np.array([0.0, 0.0]), "b": np.array([3.0])}]
    assert max_difference(left, right) == 2.0
    assert max_difference(left, left) == 0.0


def test_positions_that_count_keep_what_is_there() -> None:
    mask, hidden = np.array([[1, 1, 0]]), np.ones((1, 3, 2), np.float32)
    hidden[0, 2, 0] = np.nan
    assert counted(hidden, mask).sum(axis=-1).tolist() == [[2, 2, 0]]
    assert counted(np.ones((1, 3)), mask).tolist() == [[1, 1, 0]]


def test_every_precision_has_a_tolerance_and_narrower_ones_are_wider() -> None:
    limits = {precision: tolerance_for(precision, 6) for precision in PRECISIONS}
    assert limits["fp32"].atol < limits["fp16"].atol < limits["bf16"].atol < limits["int8-dynamic"].atol
    assert limits["int8-dynamic"] == limits["int4"], "each is held against its own weights"
    assert limits["int8-dynamic"].atol < limits["int8"].atol


def test_a_position_that_calibration_clips_passes_in_int8_alone() -> None:
    """all-MiniLM-L6-v2 at 8x128: one number in a position of random tokens is off by 9.9 times that position's size."""
    reference = np.random.default_rng(0).standard_normal((8, 128, 384))
    found = reference.copy()
    found[3, 70, 5] += 9.9
    clipped = {precision: within(reference, found, tolerance_for(precision, 6)) for precision in PRECISIONS}
    assert [precision for precision, passes in clipped.items() if passes] == ["int8"]
    found[3, 70, 5] += 15
    assert not within(reference, found, tolerance_for("int8", 6))


@given(pairs(), st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_model_that_keeps_half_of_the_limits_is_judged_by_them_alone(
    pair: tuple[np.ndarray, np.ndarray], share_abs: float, share_rms: float
) -> None:
    (reference, found), limit = pair, tolerance_for("fp32", 6)
    scale = scale_of(reference)
    size = float(np.sqrt(np.mean(reference * reference)))
    own = Rounding(share_abs * limit.atol * scale, min(share_rms * limit.rms * scale, 6e-4 * size))
    assert within(reference, found, limit, own) == within(reference, found, limit)
    old = replace(limit, rms=float("inf"))
    assert within(reference, found, old) or not within(reference, found, limit), "and never wider than without rms"


def test_four_times_what_pytorch_is_off_by_beyond_half_of_a_limit_is_allowed_on_top() -> None:
    reference, limit = np.ones(1000), limits(1e-5, 0.0, ANY_ANGLE)
    found = reference.copy()
    own = Rounding(max_abs=1.5e-5)  # 1e-5 beyond half
    for off, passes in ((4.99e-5, True), (5.01e-5, False)):
        found[7] = 1 + off
        assert within(reference, found, limit, own) == passes
    assert not within(reference, found - off + 1.1e-5, limit)


def test_small_errors_everywhere_fail_where_a_single_one_is_rounding() -> None:
    reference, limit = np.random.default_rng(0).standard_normal(1000), tolerance_for("fp32", 6)
    everywhere, one = reference + 5e-6, reference.copy()
    one[3] += 2e-5
    assert within(reference, one, limit)
    assert not within(reference, everywhere, limit)
    assert within(reference, everywhere, limit, Rounding(max_abs=5e-6, rms=2.5e-6)), "as PyTorch's own would be"


def test_the_angle_is_allowed_what_pytorchs_own_is() -> None:
    rng = np.random.default_rng(0)
    reference = 1e-2 * rng.standard_normal(1000)
    found = reference + 3e-5 * rng.standard_normal(1000)  # an angle of 3e-3, where 1.4e-3 is allowed
    limit = Tolerance(1e-1, 0.0, 1 - 1e-6, 1e-1)
    assert not within(reference, found, limit, Rounding(0.0, 5e-6))
    assert within(reference, found, limit, Rounding(0.0, 2e-5))
    assert not within(reference, -reference, limit, Rounding(0.0, 1e-4)), "the allowance is bounded"


def test_what_float32_cannot_compute_is_refused_by_name_even_where_nothing_differs() -> None:
    reference = np.full((2, 3), 0.5)
    for own in (Rounding(0.2, 0.0051), Rounding(float("inf"), float("inf")), Rounding(float("nan"), float("nan"))):
        assert unprovable(reference, own)
        case = [{"o": reference}]
        (verdict,) = compare(case, case, ["text"], tolerance_for("fp32", 1), [{"o": own}])
        assert (bool(verdict), verdict.unprovable) == (False, True)
        assert "output o, case text: PyTorch's own float32 differs from its float64 by " in verdict.describe()
    assert not unprovable(reference, Rounding(0.2, 0.0049))
    assert not unprovable(np.zeros(3), Rounding(0.0, 0.0))
    assert not unprovable(np.full(3, 1e-9), Rounding(1e-9, 1e-9), has_angle=False), "an entropy of certain rows"


UNIT = np.random.default_rng(0).standard_normal((8, 384))
UNIT /= np.linalg.norm(UNIT, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("precision", "passes", "refused"), [("fp32", 1 + 1e-6, 1 + 1e-5), ("fp16", 1.01, 1.02), ("bf16", 1.05, 1.07)]
)
def test_a_wrong_scale_is_refused_though_no_angle_shows_it(precision: Precision, passes: float, refused: float) -> None:
    """Sentence embeddings of size 1, whose numbers are small beside 1."""
    limit = tolerance_for(precision, 6)
    for factor, verdict in ((passes, True), (1 / passes, True), (refused, False), (1 / refused, False)):
        assert within(UNIT, UNIT * factor, limit) == verdict, factor
    one_row = UNIT.copy()
    one_row[5] *= refused
    assert not within(UNIT, one_row, limit)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_dropped_normalize_is_refused_in_every_precision(precision: Precision) -> None:
    (verdict,) = compare([{"o": UNIT}], [{"o": 5 * UNIT}], ["text"], tolerance_for(precision, 6))
    assert not verdict
    assert verdict.describe().endswith("cosine 1.0000000, size off by 4")


@pytest.mark.parametrize("size", [1e-3, 1e-5])
def test_a_small_output_is_held_to_its_own_size(size: float) -> None:
    reference = size * np.random.default_rng(0).standard_normal((8, 384))
    assert within(reference, reference * (1 + 1e-6), tolerance_for("fp32", 6))
    assert not within(reference, reference * (1 + 1e-5), tolerance_for("fp32", 6))


def test_the_size_of_rows_with_few_numbers_is_asked_of_the_output() -> None:
    """A row of two logits may lie near zero by chance; one number has no size at all beside it."""
    logits, limit = np.array([[3.0, -2.0], [1e-3, 2e-3]]), tolerance_for("fp16", 2)
    assert within(logits, logits + 4e-3, limit)
    assert not within(logits, 1.02 * logits, limit)
    score = np.array([[1e-3]])
    assert within(score, score + 4e-3, limit)


@pytest.mark.parametrize("shape", [(8, 384), (8, 3), (8, 4, 96), (8, 4, 3)])
def test_an_ill_conditioned_place_widens_no_limit_but_its_own(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    reference, limit = rng.standard_normal(shape), tolerance_for("fp32", 6)
    float32 = reference + 1e-7 * rng.standard_normal(shape)
    error = 1e-3 * rng.standard_normal(shape[-1])
    first = (0,) * (len(shape) - 1)
    float32[first] += error
    own, there, elsewhere = rounding(reference, float32), reference.copy(), reference.copy()
    there[first] -= error
    assert within(reference, there, limit, own)
    elsewhere[-1 if len(shape) == 2 else (0, 1)] -= error
    assert not within(reference, elsewhere, limit, own)


def test_a_row_that_float32_cannot_compute_is_refused_whatever_the_others_are() -> None:
    own = rounding(UNIT, np.where(np.arange(8)[:, None] == 3, 1.02 * UNIT, UNIT))
    assert own.rms_of_all < 0.01 * np.sqrt(np.mean(UNIT**2))
    assert unprovable(UNIT, own)


def test_rounding_is_what_float32_is_off_by_at_each_place() -> None:
    reference = np.array([[1.0, 2.0], [3.0, 4.0]])
    own = rounding(reference, np.array([[1.0, 2.5], [3.0, 4.0]], np.float32))
    assert np.asarray(own.max_abs).tolist() == [0.5, 0.0]
    assert np.asarray(own.rms).tolist() == pytest.approx([0.5 / 2**0.5, 0.0])
    assert (own.largest, own.rms_of_all) == (0.5, pytest.approx(0.25))
    worst = own.worst(Rounding(np.array([0.1, 0.2]), np.array([0.7, 0.1])))
    assert np.asarray(worst.max_abs).tolist() == [0.5, 0.2]
    assert np.asarray(worst.rms).tolist() == [0.7, 0.1]


@pytest.mark.parametrize(
    ("shape", "places"), [((4,), (4,)), ((4, 3), (4,)), ((4, 3, 2), (4, 3)), ((4, 3, 2, 5), (4, 3))]
)
def test_a_place_is_a_position_or_a_row(shape: tuple[int, ...], places: tuple[int, ...]) -> None:
    assert np.shape(rounding(np.ones(shape), np.ones(shape, np.float32)).max_abs) == places


def test_a_place_that_is_not_finite_is_off_by_all() -> None:
    own = rounding(np.ones((3, 2)), np.array([[1, np.nan], [1, 1], [-np.inf, 1]], np.float32))
    assert np.asarray(own.max_abs).tolist() == np.asarray(own.rms).tolist() == [np.inf, 0, np.inf]


def test_beyond_half_of_a_limit_four_times_the_rest_is_allowed() -> None:
    assert with_rounding(np.array([1.0, 1.0, 1.0]), np.array([0.5, 0.6, 2.0])) == pytest.approx([1.0, 1.4, 7.0])


def test_what_any_provable_rounding_allows_is_explainable() -> None:
    """Most of it at one place or spread; and nothing is that no such rounding allows."""
    rng, limit, allowed = np.random.default_rng(0), tolerance_for("fp32", 2), 0
    for size in np.geomspace(1e-5, 1, 60):
        reference = rng.standard_normal((2, 3, 20))
        rms = rng.random((2, 3)) ** 8
        rms *= 0.0099 / np.sqrt(np.mean(rms**2, axis=1, keepdims=True))
        rms *= np.sqrt(np.mean(reference**2, axis=(1, 2)))[:, None]
        own = Rounding(rms * np.sqrt(20), rms)
        assert not unprovable(reference, own)
        found = reference + rng.standard_normal(reference.shape) * size * rms[..., None] * 100
        is_allowed = within(reference, found, limit, own)
        assert explainable(reference, found, limit) or not is_allowed
        allowed += is_allowed
    assert 10 < allowed < 50
    assert not explainable(reference, 2 * reference, limit)
