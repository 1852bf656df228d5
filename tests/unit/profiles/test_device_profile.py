from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.errors import ProfileError
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.device_profile import TensorRTOptions, profile_data, profile_precisions, read_profile
from nestforge.profiles.precision import PRECISIONS, run_by

DATA: dict[str, Any] = {
    "schema_version": 1,
    "name": "board",
    "description": "a test board",
    "backend": "onnxruntime",
    "cores": 4,
    "memory_mb": 4000,
    "rates": {
        "gemm_gflops": 100,
        "batched_gemm_gflops": 50,
        "elementwise_gb_s": 20,
        "bandwidth_gb_s": 10,
        "op_overhead_us": 0,
    },
    "width_multiple": 16,
    "buckets": ["1x128", "8x32", "4x64"],
    "budgets": {"full": {}, "fast": {"latency_ms": "50 %", "memory_mb": 100, "parameters": 1000, "flops": "12.5%"}},
}


def changed(path: str, value: object) -> dict[str, Any]:
    """DATA with the value at ``path`` (dotted) replaced."""
    head, _, rest = path.partition(".")
    if not rest:
        return {**DATA, head: value}
    return {**DATA, head: {**DATA[head], rest: value}}


def test_reads_units_buckets_and_defaults() -> None:
    profile = read_profile(DATA, "here")
    assert profile.buckets == (Bucket(1, 128), Bucket(8, 32), Bucket(4, 64))
    assert (profile.precisions, profile.opset, profile.levels, profile.memory_mb) == (("fp32",), 20, None, 4000.0)
    assert profile.promotion_order == "increasing"
    assert profile.budgets["full"] == BudgetSpec()
    assert profile.budgets["fast"] == BudgetSpec("50 %", 100.0, 1000, "12.5%")


def test_budgets_are_judged_in_the_bucket_of_most_tokens_then_of_the_longest_sequence() -> None:
    assert read_profile(DATA, "here").budget_bucket == Bucket(4, 64)


def test_precisions_are_one_or_a_list_and_keep_their_order() -> None:
    one = read_profile({**DATA, "precision": "int8"}, "here")
    several = read_profile({**DATA, "precision": ["int8", "fp32"]}, "here")
    assert (one.precisions, profile_data(one)["precision"]) == (("int8",), "int8")
    assert (several.precisions, profile_data(several)["precision"]) == (("int8", "fp32"), ["int8", "fp32"])
    for profile in (one, several):
        assert read_profile(profile_data(profile), "there") == profile
        assert profile_precisions(profile_data(profile)) == profile.precisions


def test_options_of_tensorrt() -> None:
    given = {"workspace_mb": 512, "hardware_compatibility": "ampere_plus", "time_limit_s": 60}
    profile = read_profile({**DATA, "backend": "tensorrt", "tensorrt": given}, "here")
    assert profile.tensorrt == TensorRTOptions(512, hardware_compatibility="ampere_plus", time_limit_s=60.0)
    assert read_profile(profile_data(profile), "there") == profile
    assert read_profile({**DATA, "backend": "tensorrt"}, "here").tensorrt is None
    with pytest.raises(ProfileError, match=r"^here: tensorrt: only for backend tensorrt, this profile's is onn"):
        read_profile({**DATA, "tensorrt": {}}, "here")
    with pytest.raises(ProfileError, match="here: tensorrt: optimization_level: got 6; expected one of 0, 1"):
        read_profile({**DATA, "backend": "tensorrt", "tensorrt": {"optimization_level": 6}}, "here")
    with pytest.raises(ProfileError, match="here: tensorrt: workspace_mb: expected at least 1, got 0"):
        read_profile({**DATA, "backend": "tensorrt", "tensorrt": {"workspace_mb": 0}}, "here")


def test_capacities_of_caches_of_one_size() -> None:
    profile = read_profile({**DATA, "backend": "tensorrt", "capacities": [256, 1024]}, "here")
    assert read_profile(profile_data(profile), "there") == profile
    assert profile.capacities_for(4096) == (256, 1024)
    assert profile.capacities_for(1000) == (256, 1000)
    assert profile.capacities_for(100) == (100,)
    assert read_profile({**DATA, "backend": "tensorrt"}, "here").capacities_for(4096) == (512, 2048)
    assert read_profile(DATA, "here").capacities_for(4096) == (None,)
    with pytest.raises(ProfileError, match=r"^here: capacities: only for backend tensorrt, this profile's is onnx"):
        read_profile({**DATA, "capacities": [256]}, "here")
    for wrong in ([], [1], [256, 256]):
        with pytest.raises(ProfileError, match="here: capacities: expected numbers of tokens, each once and 2 or"):
            read_profile({**DATA, "backend": "tensorrt", "capacities": wrong}, "here")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, "here: schema_version 2, expected 1"),
        ("name", "", "here: name: expected text, got an empty one"),
        ("backend", "onnx-runtime", "here: backend: got 'onnx-runtime'; did you mean 'onnxruntime'?"),
        ("precision", "fp8", f"here: precision: got 'fp8'; expected one of {', '.join(PRECISIONS)}"),
        ("precision", ["fp32", 16], f"here: precision: got 16; expected one of {', '.join(PRECISIONS)}"),
        ("precision", [], "here: precision: expected at least one"),
        (
            "precision",
            "bf16",
            "here: precision: bf16 does not run on onnxruntime; expected some of " + ", ".join(run_by("onnxruntime")),
        ),
        ("precision", ["fp32", "int8", "int8"], "here: precision: int8 is named twice"),
        ("precisions", ["fp32"], "here: unknown key 'precisions'; did you mean 'precision'?"),
        (
            "rates.at",
            {"fp8": {"gemm_gflops": 1, "batched_gemm_gflops": 1}},
            f"here: rates: at: got 'fp8'; expected one of {', '.join(PRECISIONS)}",
        ),
        (
            "rates.at",
            {"int8": {"gemm_gflops": 0, "batched_gemm_gflops": 1}},
            "here: rates: at.int8: gemm_gflops: expected more than 0, got 0",
        ),
        ("cores", 0, "here: cores: expected at least 1, got 0"),
        ("memory_mb", -1, "here: memory_mb: expected more than 0, got -1"),
        ("width_multiple", 8.0, "here: width_multiple: got 8.0; expected one of 16, 64, 8"),
        ("width_multiple", 12, "here: width_multiple: got 12; expected one of 16, 64, 8"),
        ("opset", 23, "here: opset: got 23; expected one of 20, 21, 22"),
        ("rates.gemm_gflops", 0, "here: rates: gemm_gflops: expected more than 0, got 0"),
        ("rates.op_overhead_us", -0.5, "here: rates: op_overhead_us: expected at least 0, got -0.5"),
        ("buckets", [], "here: buckets: expected a list such as [1x32, 1x128], got []"),
        (
            "buckets",
            ["128"],
            "here: buckets: bucket '128': expected BATCHxSEQUENCE, such as 1x128, or with a range, such as 1x1..128",
        ),
        ("budget_at", "1x1..8", "here: budget_at: expected one shape, such as 1x8, got the range 1x1..8"),
        ("buckets", ["1x8", "b1-s8"], "here: buckets: one stands twice in 1x8, b1-s8"),
        ("budgets", {}, "here: budgets: expected at least one; full: {} asks for the universal model"),
        (
            "budgets.fast",
            {"latency_ms": "110 %"},
            "here: budgets.fast: latency_ms: expected a positive number or a share such as \"50 %\", got '110 %'",
        ),
        (
            "budgets.fast",
            {"flops": "1e6"},
            'here: budgets.fast: flops: expected a positive number, such as 94.4M, or a share such as "50 %", got '
            "'1e6'",
        ),
        (
            "budgets.fast",
            {"memory_mb": "1M"},
            "here: budgets.fast: memory_mb: expected a positive number or a share such as \"50 %\", got '1M'",
        ),
        (
            "promotion_order",
            "flat",
            "here: promotion_order: got 'flat'; expected one of decreasing, down-up, increasing, up-down",
        ),
        ("budgets.fast", {"parameters": 0}, "here: budgets.fast: parameters: expected more than 0, got 0"),
    ],
)
def test_refusals(path: str, value: object, message: str) -> None:
    with pytest.raises(ProfileError) as failure:
        read_profile(changed(path, value), "here")
    assert str(failure.value) == message


def test_missing_keys_are_named() -> None:
    with pytest.raises(ProfileError, match=r"^here: missing key 'buckets'$"):
        read_profile({key: value for key, value in DATA.items() if key != "buckets"}, "here")
