import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.compiler.planning.cost_model import Correction, Cost, fit_correction, predict, predict_memory_bytes
from nestforge.profiles.device_profile import DeviceProfile, read_profile
from nestforge.workload import Op


@pytest.fixture
def profile() -> DeviceProfile:
    """1000 GFLOPS, 500 batched; 10 GB/s from memory, 20 GB/s elementwise; 100 us an operation."""
    rates = {
        "gemm_gflops": 1000,
        "batched_gemm_gflops": 500,
        "elementwise_gb_s": 20,
        "bandwidth_gb_s": 10,
        "op_overhead_us": 100,
    }
    data = {
        "schema_version": 1,
        "name": "paper",
        "description": "round figures",
        "backend": "onnxruntime",
        "cores": 1,
        "memory_mb": 1000,
        "rates": rates,
        "width_multiple": 8,
        "buckets": ["1x8"],
        "budgets": {"full": {}},
    }
    return read_profile(data, "test")


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (Op("compute bound", "gemm", 4_000_000_000, 0, 0), (4.0, 0.0)),
        (Op("weights bound", "gemm", 1_000, 20_000_000, 40_000_000), (4.0, 0.0)),
        (Op("attention", "batched_gemm", 1_000_000_000, 0, 0), (0.0, 2.0)),
        (Op("norm", "elementwise", 10**15, 0, 40_000_000), (0.0, 2.0)),
        (Op("embedding", "gather", 0, 10_000_000, 0), (0.0, 1.0)),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else "",
)
def test_roofline(profile: DeviceProfile, op: Op, expected: tuple[float, float]) -> None:
    cost = predict([op], profile)
    assert (cost.gemm_ms, cost.other_ms, cost.overhead_ms) == (*expected, 0.1)
    assert cost.predicted_ms == pytest.approx(sum(expected) + 0.1)


def test_operations_add_up(profile: DeviceProfile) -> None:
    ops = [
        Op("up", "gemm", 2_000, 400, 100),
        Op("act", "elementwise", 50, 0, 9_000),
        Op("scores", "batched_gemm", 3_000, 0, 200),
    ]
    cost = predict(ops, profile)
    assert (cost.flops, cost.moved_bytes) == (5_050, 9_700)
    # The operands of the largest product, as often as the arena keeps them; passes of elementwise work do not pile up.
    assert cost.activation_bytes == 8 * 200
    assert cost.overhead_ms == pytest.approx(0.3)


def test_memory_counts_the_most_demanding_bucket() -> None:
    costs = [Cost(0, 0, activations, 0.0, 0.0, 0.0) for activations in (30, 500, 20)]
    assert predict_memory_bytes(1_000, costs) == 1_500
    assert predict_memory_bytes(1_000, []) == 1_000


def cost(gemm_ms: float, other_ms: float, overhead_ms: float = 0.2) -> Cost:
    return Cost(0, 0, 0, gemm_ms, other_ms, overhead_ms)


def test_one_measurement_scales_the_prediction() -> None:
    found = fit_correction([cost(3.0, 0.8)], [6.0])
    assert found.rungs == 1
    assert found.corrected_ms(cost(3.0, 0.8)) == pytest.approx(6.0)
    assert found.corrected_ms(cost(1.5, 0.4, 0.1)) == pytest.approx(3.0)


def test_measured_rungs_tell_the_parts_apart() -> None:
    truth = Correction(1.3, 2.0, 1.0, 0)
    rungs = [cost(8.0, 0.5), cost(1.0, 3.0), cost(4.0, 2.0), cost(0.5, 0.5), cost(6.0, 6.0), cost(3.0, 0.1)]
    found = fit_correction(rungs, [truth.corrected_ms(rung) for rung in rungs])
    unseen = cost(2.0, 5.0)
    assert found.corrected_ms(unseen) == pytest.approx(truth.corrected_ms(unseen), rel=0.03)
    assert truth.corrected_ms(unseen) > 1.7 * unseen.predicted_ms


def test_no_part_ever_gets_cheaper_than_nothing() -> None:
    # Taken alone the two rungs would ask for a negative factor on the products.
    found = fit_correction([cost(1.0, 0.1, 0.0), cost(4.0, 0.4, 0.0)], [5.0, 4.0])
    assert min(found.gemm, found.other, found.overhead) >= 0


@pytest.mark.parametrize(("costs", "measured"), [([], []), ([cost(1, 1)], []), ([cost(1, 1)], [0.0])])
def test_measurements_must_fit_the_costs(costs: list[Cost], measured: list[float]) -> None:
    with pytest.raises(ValueError, match="expected one positive measurement per cost"):
        fit_correction(costs, measured)


milliseconds = st.floats(0.01, 100.0)


@given(st.lists(st.tuples(milliseconds, milliseconds, milliseconds), min_size=1, max_size=6), st.floats(0.2, 5.0))
def test_uniformly_wrong_prediction_is_put_right(parts: list[tuple[float, float, float]], factor: float) -> None:
    costs = [cost(*part) for part in parts]
    found = fit_correction(costs, [factor * one.predicted_ms for one in costs])
    for one in costs:
        assert found.corrected_ms(one) == pytest.approx(factor * one.predicted_ms, rel=1e-6)


@given(
    st.lists(st.tuples(milliseconds, milliseconds, milliseconds, milliseconds), min_size=1, max_size=5),
    st.tuples(milliseconds, milliseconds, milliseconds),
    st.tuples(milliseconds, milliseconds, milliseconds),
)
def test_more_work_never_becomes_faster(
    rungs: list[tuple[float, float, float, float]],
    small: tuple[float, float, float],
    more: tuple[float, float, float],
) -> None:
    found = fit_correction([cost(*rung[:3]) for rung in rungs], [rung[3] for rung in rungs])
    large = tuple(np.add(small, more))
    assert found.corrected_ms(cost(*small)) <= found.corrected_ms(cost(*large))
