"""The cost model's choice against what was measured, with the rates of the core that it was measured on."""

from __future__ import annotations

import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.planning.variants import chosen_variants
from nestforge.exporters.source import open_source
from nestforge.profiles.load_profile import load_profile
from support.tiny_compile import board

CORE = {
    "gemm_gflops": 87,
    "batched_gemm_gflops": 75,
    "elementwise_gb_s": 20,
    "bandwidth_gb_s": 15,
    "op_overhead_us": 0.3,
}


@pytest.mark.parametrize(("batch", "percent"), [(1, 100), (1, 50), (8, 100), (8, 50), (8, 25)])
def test_experts_on_a_processor(batch: int, percent: int) -> None:
    source = open_source("preset:sparse-mixer-base")
    submodel = source.spec.submodel({"moe.capacity_factor": percent})
    assert chosen_variants(source, submodel, Bucket(batch, 512), board(rates=CORE)) == {
        "moe.dispatch": "gather",
        "moe.products": "per_expert",
        "moe.combine": "scatter",
    }


@pytest.mark.parametrize("batch", [1, 8])
def test_spectra_on_a_processor(batch: int) -> None:
    source = open_source("preset:hartley-mixer-4")
    assert chosen_variants(source, source.spec.universal(), Bucket(batch, 512), board(rates=CORE)) == {
        "mixing": "folded"
    }


def test_a_device_where_operations_cost_much_has_few_of_them() -> None:
    source = open_source("preset:sparse-mixer-base")
    variants = chosen_variants(source, source.spec.universal(), Bucket(1, 512), load_profile("h200"))
    assert (variants["moe.products"], variants["moe.combine"]) == ("batched", "one_hot")
