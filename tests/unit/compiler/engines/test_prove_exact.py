"""The limits of a quantised engine without the rounding of its activations."""

from __future__ import annotations

import math

import pytest
from nestforge.compiler.engines.prove_exact import exact_limit
from nestforge.compiler.parity.compare import tolerance_for
from onnx import helper


def graph_of(*products: tuple[str, int]) -> bytes:
    nodes = [
        helper.make_node(kind, ["x", "w"], [f"y{number}"], **({"K": inputs} if kind == "MatMulNBits" else {}))
        for number, (kind, inputs) in enumerate(products)
    ]
    return helper.make_model(helper.make_graph(nodes, "g", [], [])).SerializeToString()


@pytest.mark.parametrize(
    ("products", "factor"),
    [
        ([("Gemm", 8192)], 1.0),
        ([("MatMulNBits", 512)], 1.0),
        ([("MatMulNBits", 768), ("Gemm", 8192)], 1.0),
        ([("MatMulNBits", 2048), ("MatMulNBits", 8192)], math.sqrt(8192 / 768)),
    ],
)
def test_a_product_of_4_bits_sums_in_one_chain(products: list[tuple[str, int]], factor: float) -> None:
    limit, found = tolerance_for("fp32", 16), exact_limit(graph_of(*products), 16)
    assert (found.atol, found.rtol, found.rms) == (limit.atol * factor, limit.rtol * factor, limit.rms * factor)
    assert found.angle == pytest.approx(limit.angle * factor)
