from types import SimpleNamespace

import numpy as np
import pytest
from nestforge.profiles import measure_rates
from nestforge.profiles.measure_rates import (
    CHAINS,
    CHAINS_BY_PRECISION,
    matmul_nbits_constants,
    measure_host_rates,
    numpy_run,
    onnxruntime_run,
    qgemm_constants,
)


@pytest.mark.parametrize("name", ["gemm", "batched_gemm", "tiny"])
def test_both_ways_run_the_same_work(name: str) -> None:
    np.testing.assert_allclose(
        onnxruntime_run(CHAINS[name], cores=1)(), numpy_run(CHAINS[name])(), rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("name", CHAINS)
def test_chains_keep_their_values_in_range(name: str) -> None:
    for output in (numpy_run(CHAINS[name])(), onnxruntime_run(CHAINS[name], cores=1)()):
        assert output.shape == CHAINS[name].shape
        assert np.isfinite(output).all()
        assert np.abs(output).max() > 1e-6  # far from the slow subnormal numbers


@pytest.mark.parametrize("name", ["gemm", "batched_gemm"])
def test_work_counts_a_multiply_add_as_two(name: str) -> None:
    chain = CHAINS[name]
    rows = int(np.prod(chain.shape[:-1]))
    # Gemm's weights are [n, k], MatMul's operands [heads, k, n]: either way rows * k * n products.
    assert chain.work == sum(2 * rows * int(np.prod(shape[-2:])) for shape in chain.operands.values())


@pytest.mark.parametrize(("onnx_found", "source"), [(True, "onnxruntime"), (False, "numpy")])
def test_every_rate_is_measured_and_the_source_said(
    monkeypatch: pytest.MonkeyPatch, onnx_found: bool, source: str
) -> None:
    monkeypatch.setattr(measure_rates, "_SECONDS_PER_ROUND", 0.0)
    monkeypatch.setattr(measure_rates, "_READ_BYTES", 2**20)
    monkeypatch.setattr(measure_rates, "util", SimpleNamespace(find_spec=lambda name: onnx_found))
    rates = measure_host_rates(cores=1)
    figures = [value for value in vars(rates).values() if isinstance(value, float)]
    assert len(figures) == 5
    assert min(figures) > 0
    if onnx_found:
        assert list(rates.at) == ["int8-dynamic", "int8", "int4", "int4-g128"]
        assert {products.batched_gemm_gflops for products in rates.at.values()} == {rates.batched_gemm_gflops}
        assert min(products.gemm_gflops for products in rates.at.values()) > 0
    else:
        assert rates.at is None
    assert rates.source.startswith(f"measured on this host with {source} ")


@pytest.mark.parametrize(
    ("name", "least"), [("int8", 0.995), ("int8-dynamic", 0.995), ("int4", 0.95), ("int4-g128", 0.95)]
)
def test_integer_products_are_those_of_the_same_weights(name: str, least: float) -> None:
    chain = CHAINS_BY_PRECISION[name]
    found, exact = onnxruntime_run(chain, cores=1)(), numpy_run(CHAINS["gemm"])()
    assert (found.shape, chain.work) == (exact.shape, CHAINS["gemm"].work)
    cosine = float(np.sum(found * exact) / np.linalg.norm(found) / np.linalg.norm(exact))
    assert least < cosine < 0.9999, "rounded, and to integers"


def test_integer_chains_have_the_kernels_of_engines() -> None:
    import onnx

    kernels = {
        name: {
            (node.domain, node.op_type) for node in onnx.load_from_string(measure_rates._onnx_bytes(chain)).graph.node
        }
        for name, chain in CHAINS_BY_PRECISION.items()
    }
    eight = {("", "QuantizeLinear"), ("com.microsoft", "QGemm")}
    rows = eight | {("", operator) for operator in ("Abs", "ReduceMax", "Div", "Mul")}
    four = rows | {("com.microsoft", "MatMulNBits")}
    assert kernels == {"int8": eight, "int8-dynamic": rows, "int4": four, "int4-g128": four}


@pytest.mark.parametrize("name", CHAINS_BY_PRECISION)
def test_a_measurement_says_nothing_of_graphs(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    onnxruntime_run(CHAINS_BY_PRECISION[name], cores=1)
    assert capfd.readouterr() == ("", "")


WEIGHT = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)


def test_eight_bits_have_a_scale_for_each_output() -> None:
    found = qgemm_constants("w", WEIGHT, largest=2.54)
    assert (found["w.step"], found["w.middle"], found["w.last"].tolist()) == (np.float32(0.02), 128, [-1])
    integers, scale, zero = found["w.integers"], found["w.scale"], found["w.zero"]
    assert (integers.dtype, scale.shape, zero.dtype, zero.any()) == (np.int8, (16,), np.int8, np.False_)
    assert np.abs(integers).max(axis=1).tolist() == [127] * 16
    assert (np.abs(integers * scale[:, None] - WEIGHT) <= 0.501 * scale[:, None]).all()


def test_four_bits_have_a_scale_for_each_block_and_share_bytes() -> None:
    found = matmul_nbits_constants("w", WEIGHT, 32)
    packed, scale = found["w.integers"], found["w.scale"]
    assert (packed.dtype, packed.shape, scale.shape) == (np.uint8, (16, 2, 16), (16, 2))
    integers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(16, 2, 32).astype(int) - 8
    assert np.abs(integers).max() == 7
    assert (np.abs(integers * scale[..., None] - WEIGHT.reshape(16, 2, 32)) <= 0.501 * scale[..., None]).all()
