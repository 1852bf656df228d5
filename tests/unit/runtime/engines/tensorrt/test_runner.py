"""Plans that run, of one shape and of a range, on tests/support/fake_tensorrt.py: no plan is really run."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.device_files.plan_index import (
    Gpu,
    build_key,
    read_plans,
    write_plans,
)
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle
from nestforge.errors import BundleCorruptError, BundleError, BundleIncompatibleError, InputError
from nestforge.profiles.device_profile import TensorRTOptions
from nestforge.runtime.device.device import DeviceArray
from nestforge.runtime.engines import measure as measuring
from nestforge.runtime.engines.measure import measure_bundle, measured_shapes
from nestforge.runtime.inputs.arrays import random_feeds
from support.fake_cuda import World
from support.fake_tensorrt import host_with_gpu, list_plans
from support.small_bundle import RANGE_SHAPES as SHAPES

if TYPE_CHECKING:
    from nestforge.runtime.engines.tensorrt.runner import TensorRTRunner

Reference = Callable[..., dict[str, Any]]


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path, world: World) -> Bundle:
    return list_plans(tiny_bundle, tmp_path / "plans.bundle")


def runner_of(bundle: Bundle, engine: EngineEntry) -> TensorRTRunner:
    from nestforge.runtime.engines.tensorrt.runner import TensorRTRunner

    return TensorRTRunner(bundle, engine)


@pytest.mark.parametrize("stripped", [True, False])
@pytest.mark.parametrize("captures", [True, False])
def test_every_engine_equals_numpy(
    tiny_bundle: Path, tmp_path: Path, world: World, expected: Reference, stripped: bool, captures: bool
) -> None:
    world.captures = captures
    bundle = list_plans(tiny_bundle, tmp_path / "plans.bundle", TensorRTOptions(strip_weights=stripped))
    for engine in bundle.manifest.engines:
        with runner_of(bundle, engine) as runner:
            assert runner.is_captured is captures
            assert runner.activation_bytes == 4096
            assert json.loads(runner.inspect())["Bindings"] == ["input_ids", "attention_mask", "hidden", "total"]
            for seed in (0, 1):
                feeds = random_feeds(bundle.manifest.inputs, engine.bucket, seed)
                hidden, total = runner.run(feeds)
                want = expected(int(engine.submodel[3:]), feeds["input_ids"], feeds["attention_mask"])
                np.testing.assert_allclose(hidden, want["hidden"], rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(total, want["total"], rtol=1e-5, atol=1e-5)
    assert world.calls.count("refit") == (len(bundle.manifest.engines) if stripped else 0)
    assert world.calls.count("graph") == (2 * len(bundle.manifest.engines) if captures else 0)


def test_threads_get_contexts_of_their_own_and_keep_them(bundle: Bundle, world: World, expected: Reference) -> None:
    engine = bundle.manifest.engines[0]
    together = threading.Barrier(3)

    def ask(seed: int) -> None:
        feeds = random_feeds(bundle.manifest.inputs, engine.bucket, seed)
        want = expected(16, feeds["input_ids"], feeds["attention_mask"])["hidden"]
        together.wait(30)
        for _ in range(20):
            np.testing.assert_allclose(runner.run(feeds)[0], want, rtol=1e-5, atol=1e-5)

    with runner_of(bundle, engine) as runner, ThreadPoolExecutor(3) as threads:
        assert list(threads.map(ask, range(3))) == [None] * 3
    assert world.calls.count("open") == 1
    assert 1 <= world.calls.count("context") <= 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"version": "11.4.0.106"}, BundleIncompatibleError, "built by TensorRT 10.3.0, this host has 11.4.0.106; run"),
        ({"gpu": "Other"}, BundleIncompatibleError, r"built for Fake GPU \(8.7\), this host has Other \(8.7\); run"),
        (
            {"free": 5000},
            BundleIncompatibleError,
            r"needs at least 0.0 MB of the GPU.s memory, 0.0 MB are free; close",
        ),
        (
            {"opens": False},
            BundleIncompatibleError,
            "cannot open this plan: Version tag does not match. Current 1",
        ),
        ({"missing": ("up.bias",)}, BundleIncompatibleError, r"1 weights are not in .*onnx: up.bias"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_host_that_cannot_run_a_plan_says_why(
    tiny_bundle: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with host_with_gpu(tmp_path / "cache", **change):
        bundle = list_plans(tiny_bundle, tmp_path / "plans.bundle")
        with pytest.raises(error, match=message) as raised:
            runner_of(bundle, bundle.manifest.engines[0]).__enter__()
        assert str(raised.value).startswith("engine ffn16@b1-s8: ")
        assert "\n" not in str(raised.value)


def test_a_plan_with_a_flipped_byte_is_never_opened(bundle: Bundle, world: World) -> None:
    engine, plan = bundle.manifest.engines[0], read_plans(bundle)[0]
    path = bundle.path / plan.file
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleCorruptError, match=rf"{plan.file}: sha256 [0-9a-f]+, plans.json expects {plan.sha256}"):
        runner_of(bundle, engine).__enter__()
    path.unlink()
    with pytest.raises(BundleCorruptError, match=f"{plan.file}: missing"):
        runner_of(bundle, engine).__enter__()
    assert world.calls == []


def test_a_plan_of_another_engine_is_refused(bundle: Bundle, world: World) -> None:
    small, large = bundle.manifest.engines[:2]
    plan = read_plans(bundle)[0]
    data = json.dumps({"graph": str(bundle.file(large.file)), "stripped": False}).encode()
    (bundle.path / plan.file).write_bytes(data)
    write_plans(bundle, [replace(plan, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())])
    with pytest.raises(
        BundleCorruptError, match=r"inputs are input_ids INT64 \[2, 16\], .* the manifest says input_ids"
    ):
        runner_of(bundle, small).__enter__()


def test_lanes_are_made_and_closed_under_the_devices_lock(
    bundle: Bundle, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocating or freeing memory of the GPU in any thread breaks a capture that ONNX Runtime has under way there;
    the runs themselves take no turns."""
    engine = bundle.manifest.engines[0]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    runner: Any = runner_of(bundle, engine)
    module = sys.modules[type(runner).__module__]  # the one that the stand-ins brought in
    lock: Any = None
    held: list[tuple[str, bool]] = []

    def note(what: str) -> None:
        nonlocal lock
        lock = lock or runner._device.lock
        held.append((what, lock._is_owned()))

    class Watched(module.ExecutionContext):
        def __init__(self, *args: Any) -> None:
            note("make")
            super().__init__(*args)

        def run(self, *args: Any) -> None:
            note("run")
            super().run(*args)
            if len(held) == 2:  # another context, beside this one
                runner.run(feeds)

        def close(self) -> None:
            note("close")
            super().close()

    monkeypatch.setattr(module, "ExecutionContext", Watched)
    with runner:
        runner.run(feeds)
    expected = [("make", True), ("run", False)]
    assert held == [*expected, *expected, ("close", True), ("close", True)]


if TYPE_CHECKING:
    from nestforge.runtime.engines.tensorrt.runner import TensorRTRunner


@pytest.fixture
def ranged(range_bundle: Path, tmp_path: Path, world: World) -> Bundle:
    return list_plans(range_bundle, tmp_path / "plans.bundle")


def range_runner(ranged: Bundle) -> TensorRTRunner:
    from nestforge.runtime.engines.tensorrt.runner import TensorRTRunner

    return TensorRTRunner(ranged, ranged.manifest.engines[0])


def on_gpu(world: World) -> int:
    return sum(block.nbytes for block in world.allocated.values() if isinstance(block, np.ndarray))


def test_shapes_are_told_where_they_change_in_room_for_the_largest(ranged: Bundle, world: World) -> None:
    with range_runner(ranged) as runner:
        assert not runner.is_captured
        taken = on_gpu(world)
        world.calls.clear()
        for seed, shape in enumerate(SHAPES):
            runner.run(random_feeds(ranged.manifest.inputs, shape, seed))
        assert on_gpu(world) == taken
    # Each of the two inputs gets its shape where it differs from the run before; nothing is captured.
    told = [f"shape {shape}" for before, shape in pairwise(SHAPES) if before != shape]
    assert [call for call in world.calls if call.startswith("shape")][::2] == [f"shape {SHAPES[0]}", *told]
    assert world.calls.count("run") == len(SHAPES)
    assert "graph" not in world.calls


def test_a_range_has_no_runs_on_the_gpus_own_memory(ranged: Bundle, world: World) -> None:
    arrays = {name: DeviceArray(0, "int64", (2, 5)) for name in ("input_ids", "attention_mask")}
    with (
        range_runner(ranged) as runner,
        pytest.raises(InputError, match="a run on the GPU's own memory is of one shape; expected a static bucket"),
    ):
        runner.bind_device(arrays, {})


def test_threads_take_turns_in_one_context(ranged: Bundle, world: World) -> None:
    asked = [random_feeds(ranged.manifest.inputs, shape) for shape in SHAPES]
    with range_runner(ranged) as runner, ThreadPoolExecutor(3) as threads:
        list(threads.map(runner.run, 6 * asked))
    assert world.calls.count("context") == 1


def test_an_output_of_another_shape_never_reaches_memory(ranged: Bundle, world: World) -> None:
    feeds = random_feeds(ranged.manifest.inputs, Bucket(2, 5))
    with range_runner(ranged) as runner:
        world.more_rows = 1
        runs = world.calls.count("run")
        with pytest.raises(BundleError, match=r"^engine .*: hidden: expected shape \[2, 5, 16\], got \[3, 5, 16\]$"):
            runner.run(feeds)
        assert world.calls.count("run") == runs
        world.more_rows = 0
        assert runner.run(feeds)[0].shape == (2, 5, 16)  # in a context of its own: the other one was closed


def test_a_plan_of_another_range_is_refused(ranged: Bundle, world: World) -> None:
    plan = next(entry for entry in read_plans(ranged) if entry.graph == ranged.manifest.engines[0].file)
    built = json.loads((ranged.path / plan.file).read_bytes())
    built["profiles"][0]["attention_mask"][2] = [4, 32]
    data = json.dumps(built).encode()
    (ranged.path / plan.file).write_bytes(data)
    write_plans(ranged, [replace(plan, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())])
    with pytest.raises(BundleCorruptError) as raised:
        range_runner(ranged).__enter__()
    assert str(raised.value) == (
        f"engine ffn16@b1_4-s2_16: {plan.file}: attention_mask: the plan takes [1, 2] to [4, 32], "
        "the manifest's bucket 1..4x2..16 says [1, 2] to [4, 16]"
    )


def test_memory_is_counted_for_the_largest_shape(ranged: Bundle, world: World) -> None:
    world.free = 4 * 16 * 16 * 4  # the largest hidden states alone
    with pytest.raises(BundleIncompatibleError, match="of the GPU's memory"):
        range_runner(ranged).__enter__()


def test_a_plan_is_measured_at_sizes_all_over_its_range(ranged: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ROUND_SECONDS", "_SHAPE_SECONDS"):
        monkeypatch.setattr(measuring, name, 0.0)
    measured = measure_bundle(ranged, lambda *_: None, threads=1, force=True).measurement
    assert [each.engine for each in measured.engines] == [engine.id for engine in ranged.manifest.engines]
    for each in measured.engines:
        assert [(point.batch, point.sequence) for point in each.points] == [
            (shape.batch, shape.sequence) for shape in measured_shapes(Bucket(4, 16, 1, 2))
        ]
        assert all(point.p50_ms > 0 for point in each.points)


def test_a_plan_follows_from_the_ends_of_its_range_and_its_tuned_shape(ranged: Bundle) -> None:
    """The graph names its free dimensions and says no more."""
    gpu, options = Gpu("Fake GPU", "8.7", "10.3.0"), TensorRTOptions()
    engine = ranged.manifest.engines[0]
    longer = replace(engine, bucket=Bucket(4, 32, 1, 2))
    provenance = replace(ranged.manifest.provenance, profile={"budget_at": "1x4"})
    tuned = replace(ranged, manifest=replace(ranged.manifest, provenance=provenance))
    keys = [build_key(*each, gpu, options) for each in ((ranged, engine), (ranged, longer), (tuned, engine))]
    assert len(set(keys)) == 3
    static = replace(engine, bucket=Bucket(4, 16))
    assert build_key(ranged, static, gpu, options) == build_key(tuned, static, gpu, options)
