"""Memory of plans: their layout, and runs on memory of the caller's, on tests/support/fake_tensorrt.py."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import DTYPES as IN_MANIFEST
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.open_bundle import Bundle
from nestforge.bundle.shape_profile import ShapeProfile
from nestforge.errors import BundleError, InputError
from nestforge.runtime.device.device import DeviceArray
from nestforge.runtime.engines.tensorrt.layout import DTYPES, PlanTensor, plan_problem
from nestforge.runtime.inputs.arrays import random_feeds
from support.fake_cuda import World
from support.fake_gpu import arrays_on
from support.fake_tensorrt import list_plans

INPUTS = (TensorSpec("ids", "int64", ("batch", "sequence")), TensorSpec("flag", "bool", ("batch",)))
OUTPUTS = (TensorSpec("hidden", "float16", ("batch", "sequence", 4)),)
STATIC, RANGE = Bucket(2, 8), Bucket(2, 8, min_sequence=3)
ONE, SOME = ([ShapeProfile(bucket, bucket.largest)] for bucket in (STATIC, RANGE))


def test_a_plan_has_the_manifests_tensors() -> None:
    found = [
        PlanTensor("ids", True, "INT64", (2, 8), True),
        PlanTensor("flag", True, "BOOL", (2,), True),
        PlanTensor("hidden", False, "HALF", (2, 8, 4), True),
    ]
    assert plan_problem(INPUTS, OUTPUTS, STATIC, ONE, found) is None
    assert plan_problem(INPUTS, OUTPUTS, STATIC, ONE, found[:2]) == (
        "outputs are none, the manifest says hidden HALF [2, 8, 4]"
    )
    open_shape = PlanTensor("flag", True, "BOOL", (-1,), True, (((2,), (2,)),))
    assert plan_problem(INPUTS, OUTPUTS, STATIC, ONE, [found[0], open_shape, found[2]]) == (
        "inputs are ids INT64 [2, 8], flag BOOL [-1], the manifest says ids INT64 [2, 8], flag BOOL [2]"
    )
    unknown = replace(found[2], shape=(2, 8, -1))
    assert plan_problem(INPUTS, OUTPUTS, STATIC, ONE, [*found[:2], unknown]) == (
        "outputs are hidden HALF [2, 8, -1], the manifest says hidden HALF [2, 8, 4]"
    )
    on_host = PlanTensor("flag", True, "BOOL", (2,), False)
    assert str(plan_problem(INPUTS, OUTPUTS, STATIC, ONE, [found[0], on_host, found[2]])).startswith(
        "flag: read on the host as a shape"
    )


def test_a_plan_of_a_range_takes_what_the_manifest_says() -> None:
    found = [
        PlanTensor("ids", True, "INT64", (2, -1), True, (((2, 3), (2, 8)),)),
        PlanTensor("flag", True, "BOOL", (2,), True),
        PlanTensor("hidden", False, "HALF", (2, -1, 4), True),
    ]
    assert plan_problem(INPUTS, OUTPUTS, RANGE, SOME, found) is None
    # TensorRT may not know a size of an output before a run; that of an input it has read from the graph.
    assert plan_problem(INPUTS, OUTPUTS, RANGE, SOME, [*found[:2], replace(found[2], shape=(-1, -1, -1))]) is None
    assert plan_problem(INPUTS, OUTPUTS, RANGE, SOME, [replace(found[0], shape=(-1, -1)), *found[1:]]) == (
        "inputs are ids INT64 [-1, -1], flag BOOL [2], the manifest says ids INT64 [2, -1], flag BOOL [2]"
    )
    for wrong in ((2, 7, 4), (2, -1), (2, -1, 5)):
        assert plan_problem(INPUTS, OUTPUTS, RANGE, SOME, [*found[:2], replace(found[2], shape=wrong)]) == (
            f"outputs are hidden HALF {list(wrong)}, the manifest says hidden HALF [2, -1, 4]"
        )
    for ends in (((2, 1), (2, 8)), ((2, 3), (2, 16))):
        assert plan_problem(INPUTS, OUTPUTS, RANGE, SOME, [replace(found[0], ends=(ends,)), *found[1:]]) == (
            f"ids: the plan takes {list(ends[0])} to {list(ends[1])}, "
            "the manifest's bucket 2x3..8 says [2, 3] to [2, 8]"
        )


def test_every_type_of_the_manifest_has_a_name() -> None:
    assert tuple(DTYPES) == IN_MANIFEST


def test_a_plan_that_keeps_a_cache_has_both_profiles_and_updates_in_place() -> None:
    rows = ("batch", 2, 16, 8)
    inputs = (TensorSpec("ids", "int64", ("batch", "sequence")), TensorSpec("past_key_0", "float32", rows))
    outputs = (TensorSpec("present_key_0", "float32", rows),)
    bucket = Bucket(4, 16, 1, 1)
    profiles = [ShapeProfile(Bucket(4, 9, 1, 1), Bucket(1, 1)), ShapeProfile(Bucket(1, 16, 1, 1), Bucket(1, 16))]
    ids = PlanTensor("ids", True, "INT64", (-1, -1), True, (((1, 1), (4, 9)), ((1, 1), (1, 16))))
    past = PlanTensor(
        *("past_key_0", True, "FLOAT", (-1, 2, 16, 8), True),
        (((1, 2, 16, 8), (4, 2, 16, 8)), ((1, 2, 16, 8), (1, 2, 16, 8))),
    )
    present = PlanTensor("present_key_0", False, "FLOAT", (-1, 2, 16, 8), True, alias="past_key_0")
    found = [ids, past, present]
    assert plan_problem(inputs, outputs, bucket, profiles, found) is None
    for alias in (None, "ids"):
        wrong = [ids, past, replace(present, alias=alias)]
        assert plan_problem(inputs, outputs, bucket, profiles, wrong) == (
            f"present_key_0: shares the memory of {alias or 'no input'}, expected past_key_0"
        )
    fewer = [replace(ids, ends=ids.ends[:1]), past, present]
    assert plan_problem(inputs, outputs, bucket, profiles, fewer) == "1 optimisation profiles, expected 2"
    shorter = [replace(ids, ends=(ids.ends[0], ((1, 1), (1, 8)))), past, present]
    assert plan_problem(inputs, outputs, bucket, profiles, shorter) == (
        "ids: the plan takes [1, 1] to [1, 8], the manifest's bucket 1..1x1..16 says [1, 1] to [1, 16]"
    )


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path, world: World) -> Bundle:
    return list_plans(tiny_bundle, tmp_path / "plans.bundle")


@pytest.mark.parametrize("captures", [True, False])
def test_a_run_reads_and_writes_where_it_was_bound(bundle: Bundle, world: World, captures: bool) -> None:
    from nestforge.runtime.engines.tensorrt.runner import TensorRTRunner

    world.captures = captures
    engine = bundle.manifest.engines[1]
    with TensorRTRunner(bundle, engine) as runner:
        device = runner.device
        assert runner.device is device
        cases = [random_feeds(bundle.manifest.inputs, engine.bucket, seed) for seed in (0, 1)]
        bound = []
        for feeds in cases:
            arrays = arrays_on(device, feeds)
            total = DeviceArray(device.allocate(128), "float32", (2, 16))
            bound.append((runner.bind_device(arrays, {"total": total}), arrays, total))
        assert [run.is_captured for run, _, _ in bound] == [captures] * 2
        world.calls.clear()

        def work(number: int) -> None:
            for _ in range(20):
                bound[number][0]()

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(work, (0, 1)))
        assert world.calls.count("graph") == (40 if captures else 0)
        assert world.calls.count("run") == 40
        for feeds, (_, arrays, total) in zip(cases, bound, strict=True):
            found = np.empty((2, 16), np.float32)
            device.to_host(found, total.address)
            device.wait()
            np.testing.assert_array_equal(found, runner.run(feeds)[1])
            for array in (*arrays.values(), total):
                device.free(array.address)
        with pytest.raises(InputError, match="no array for input"):
            runner.bind_device({}, {})
    with pytest.raises(BundleError, match=r"^engine ffn16@b2-s16: not open; run it inside its `with` block$"):
        bound[0][0]()
    bound[0][0].close()
    with pytest.raises(BundleError, match="not open"):
        _ = runner.device


@pytest.mark.parametrize("captures", [True, False])
def test_a_closed_run_gives_its_graph_back(
    bundle: Bundle, world: World, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    from nestforge.runtime.device.cuda_memory import Graph
    from nestforge.runtime.engines.tensorrt.runner import TensorRTRunner

    freed: list[Graph] = []
    close = Graph.close
    monkeypatch.setattr(Graph, "close", lambda graph: (freed.append(graph), close(graph)))
    world.captures = captures
    engine = bundle.manifest.engines[1]
    with TensorRTRunner(bundle, engine) as runner:
        feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
        arrays = arrays_on(runner.device, feeds)
        first = runner.bind_device(arrays, {})
        for number in range(1, 4):
            run = runner.bind_device(arrays, {})
            run()
            run.close()
            run.close()
            assert runner._bound._runs == {first}
            assert len(freed) == captures * number
            with pytest.raises(BundleError, match="not open"):
                run()
        first()
        for array in arrays.values():
            runner.device.free(array.address)
    assert not world.allocated
