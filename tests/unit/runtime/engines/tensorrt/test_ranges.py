"""Plans that take a range of shapes, on tests/support/fake_tensorrt.py: no plan is really run."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.device_files.plan_index import Gpu, build_key, read_plans, write_plans
from nestforge.bundle.open_bundle import Bundle
from nestforge.errors import BundleCorruptError, BundleError, BundleIncompatibleError, InputError
from nestforge.profiles.device_profile import TensorRTOptions
from nestforge.runtime.device.device import DeviceArray
from nestforge.runtime.engines import measure as measuring
from nestforge.runtime.engines.measure import measure_bundle, measured_shapes
from nestforge.runtime.inputs.arrays import random_feeds
from support.fake_cuda import World
from support.fake_tensorrt import list_plans
from support.small_bundle import RANGE_SHAPES as SHAPES

if TYPE_CHECKING:
    from nestforge.runtime.engines.tensorrt.runner import TensorRTRunner


@pytest.fixture
def bundle(range_bundle: Path, tmp_path: Path, world: World) -> Bundle:
    return list_plans(range_bundle, tmp_path / "plans.bundle")


def runner_of(bundle: Bundle) -> TensorRTRunner:
    from nestforge.runtime.engines.tensorrt.runner import TensorRTRunner

    return TensorRTRunner(bundle, bundle.manifest.engines[0])


def on_gpu(world: World) -> int:
    return sum(block.nbytes for block in world.allocated.values() if isinstance(block, np.ndarray))


def test_shapes_are_told_where_they_change_in_room_for_the_largest(bundle: Bundle, world: World) -> None:
    with runner_of(bundle) as runner:
        assert not runner.is_captured
        taken = on_gpu(world)
        world.calls.clear()
        for seed, shape in enumerate(SHAPES):
            runner.run(random_feeds(bundle.manifest.inputs, shape, seed))
        assert on_gpu(world) == taken
    # Each of the two inputs gets its shape where it differs from the run before; nothing is captured.
    told = [f"shape {shape}" for before, shape in pairwise(SHAPES) if before != shape]
    assert [call for call in world.calls if call.startswith("shape")][::2] == [f"shape {SHAPES[0]}", *told]
    assert world.calls.count("run") == len(SHAPES)
    assert "graph" not in world.calls


def test_a_range_has_no_runs_on_the_gpus_own_memory(bundle: Bundle, world: World) -> None:
    arrays = {name: DeviceArray(0, "int64", (2, 5)) for name in ("input_ids", "attention_mask")}
    with (
        runner_of(bundle) as runner,
        pytest.raises(InputError, match="a run on the GPU's own memory is of one shape; expected a static bucket"),
    ):
        runner.bind_device(arrays, {})


def test_threads_take_turns_in_one_context(bundle: Bundle, world: World) -> None:
    asked = [random_feeds(bundle.manifest.inputs, shape) for shape in SHAPES]
    with runner_of(bundle) as runner, ThreadPoolExecutor(3) as threads:
        list(threads.map(runner.run, 6 * asked))
    assert world.calls.count("context") == 1


def test_an_output_of_another_shape_never_reaches_memory(bundle: Bundle, world: World) -> None:
    feeds = random_feeds(bundle.manifest.inputs, Bucket(2, 5))
    with runner_of(bundle) as runner:
        world.more_rows = 1
        runs = world.calls.count("run")
        with pytest.raises(BundleError, match=r"^engine .*: hidden: expected shape \[2, 5, 16\], got \[3, 5, 16\]$"):
            runner.run(feeds)
        assert world.calls.count("run") == runs
        world.more_rows = 0
        assert runner.run(feeds)[0].shape == (2, 5, 16)  # in a context of its own: the other one was closed


def test_a_plan_of_another_range_is_refused(bundle: Bundle, world: World) -> None:
    plan = next(entry for entry in read_plans(bundle) if entry.graph == bundle.manifest.engines[0].file)
    built = json.loads((bundle.path / plan.file).read_bytes())
    built["profiles"][0]["attention_mask"][2] = [4, 32]
    data = json.dumps(built).encode()
    (bundle.path / plan.file).write_bytes(data)
    write_plans(bundle, [replace(plan, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())])
    with pytest.raises(BundleCorruptError) as raised:
        runner_of(bundle).__enter__()
    assert str(raised.value) == (
        f"engine ffn16@b1_4-s2_16: {plan.file}: attention_mask: the plan takes [1, 2] to [4, 32], "
        "the manifest's bucket 1..4x2..16 says [1, 2] to [4, 16]"
    )


def test_memory_is_counted_for_the_largest_shape(bundle: Bundle, world: World) -> None:
    world.free = 4 * 16 * 16 * 4  # the largest hidden states alone
    with pytest.raises(BundleIncompatibleError, match="of the GPU's memory"):
        runner_of(bundle).__enter__()


def test_a_plan_is_measured_at_sizes_all_over_its_range(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ROUND_SECONDS", "_SHAPE_SECONDS"):
        monkeypatch.setattr(measuring, name, 0.0)
    measured = measure_bundle(bundle, lambda *_: None, threads=1, force=True).measurement
    assert [each.engine for each in measured.engines] == [engine.id for engine in bundle.manifest.engines]
    for each in measured.engines:
        assert [(point.batch, point.sequence) for point in each.points] == [
            (shape.batch, shape.sequence) for shape in measured_shapes(Bucket(4, 16, 1, 2))
        ]
        assert all(point.p50_ms > 0 for point in each.points)


def test_a_plan_follows_from_the_ends_of_its_range_and_its_tuned_shape(bundle: Bundle) -> None:
    """The graph names its free dimensions and says no more."""
    gpu, options = Gpu("Fake GPU", "8.7", "10.3.0"), TensorRTOptions()
    engine = bundle.manifest.engines[0]
    longer = replace(engine, bucket=Bucket(4, 32, 1, 2))
    provenance = replace(bundle.manifest.provenance, profile={"budget_at": "1x4"})
    tuned = replace(bundle, manifest=replace(bundle.manifest, provenance=provenance))
    keys = [build_key(*each, gpu, options) for each in ((bundle, engine), (bundle, longer), (tuned, engine))]
    assert len(set(keys)) == 3
    static = replace(engine, bucket=Bucket(4, 16))
    assert build_key(bundle, static, gpu, options) == build_key(tuned, static, gpu, options)
