"""The runner's side of the conversation with TensorRT, on tests/support/fake_tensorrt.py: no plan really runs."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from nestforge.bundle.device_files.plan_index import (
    read_plans,
    write_plans,
)
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle
from nestforge.errors import BundleCorruptError, BundleIncompatibleError
from nestforge.profiles.device_profile import TensorRTOptions
from nestforge.runtime.inputs.arrays import random_feeds
from support.fake_cuda import World
from support.fake_tensorrt import host_with_gpu, list_plans

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

    class Watched(module.ExecutionContext):  # type: ignore[name-defined, misc]
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
