from __future__ import annotations

import pytest
from nestforge.elastic import Bucket
from nestforge.runtime.bundle.manifest import DTYPES as IN_MANIFEST
from nestforge.runtime.bundle.manifest import TensorSpec
from nestforge.runtime.device.layout import Layout, layout_of
from nestforge.runtime.engines.tensorrt.layout import DTYPES, PlanTensor, plan_problem

INPUTS = (TensorSpec("ids", "int64", ("batch", "sequence")), TensorSpec("flag", "bool", ("batch",)))
OUTPUTS = (TensorSpec("hidden", "float16", ("batch", "sequence", 4)),)


@pytest.fixture
def layout() -> Layout:
    return layout_of(INPUTS, OUTPUTS, Bucket(2, 8))


def test_a_plan_has_the_manifests_tensors(layout: Layout) -> None:
    found = [
        PlanTensor("ids", True, "INT64", (2, 8), True),
        PlanTensor("flag", True, "BOOL", (2,), True),
        PlanTensor("hidden", False, "HALF", (2, 8, 4), True),
    ]
    assert plan_problem(layout, found) is None
    assert plan_problem(layout, found[:2]) == "outputs are none, the manifest says hidden HALF [2, 8, 4]"
    open_shape = PlanTensor("flag", True, "BOOL", (-1,), True)
    assert plan_problem(layout, [found[0], open_shape, found[2]]) == (
        "inputs are ids INT64 [2, 8], flag BOOL [-1], the manifest says ids INT64 [2, 8], flag BOOL [2]"
    )
    on_host = PlanTensor("flag", True, "BOOL", (2,), False)
    assert str(plan_problem(layout, [found[0], on_host, found[2]])).startswith("flag: read on the host as a shape")


def test_every_type_of_the_manifest_has_a_name() -> None:
    assert tuple(DTYPES) == IN_MANIFEST
