"""The contract of runners, which every back end keeps; stand-ins take the place of GPUs and of TensorRT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleError, InputError
from nestforge.runtime.engines.onnxruntime_gpu.runner import OnnxRuntimeGpuRunner
from nestforge.runtime.engines.runner import Runner, runner_for
from nestforge.runtime.inputs.arrays import random_feeds
from support.fake_gpu import HostDevice, host_provider
from support.fake_tensorrt import host_with_gpu, list_plans

Reference = Callable[..., dict[str, Any]]


def on_gpu(bundle: Bundle, engine: EngineEntry) -> Runner:
    return OnnxRuntimeGpuRunner(bundle, engine, host_provider(HostDevice()))


def ordinary(bundle: Bundle, engine: EngineEntry) -> Runner:
    return runner_for(bundle, engine, "packed", 1)


@pytest.fixture(params=["onnxruntime", "onnxruntime on a GPU", "openvino", "tensorrt"])
def backend(
    request: pytest.FixtureRequest, own_bundle: Path, tmp_path: Path
) -> Iterator[tuple[Bundle, Callable[[Bundle, EngineEntry], Runner]]]:
    """The tiny bundle for one back end, and what makes its runners."""
    match request.param:
        case "openvino":
            pytest.importorskip("openvino")
            bundle = open_bundle(own_bundle)
            engines = tuple(replace(engine, backend="openvino") for engine in bundle.manifest.engines)
            yield replace(bundle, manifest=replace(bundle.manifest, engines=engines)), ordinary
        case "tensorrt":
            with host_with_gpu(tmp_path / "cache"):
                yield list_plans(own_bundle, tmp_path / "plans.bundle"), ordinary
        case _:
            yield open_bundle(own_bundle), ordinary if request.param == "onnxruntime" else on_gpu


Backend = tuple[Bundle, Callable[[Bundle, EngineEntry], Runner]]


def test_every_engine_equals_numpy(backend: Backend, expected: Reference) -> None:
    bundle, runner_of = backend
    for engine in bundle.manifest.engines:
        with runner_of(bundle, engine) as runner:
            for seed in (0, 1):
                feeds = random_feeds(bundle.manifest.inputs, engine.bucket, seed)
                hidden, total = runner.run(feeds)
                want = expected(int(engine.submodel[3:]), feeds["input_ids"], feeds["attention_mask"])
                np.testing.assert_allclose(hidden, want["hidden"], rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(total, want["total"], rtol=1e-5, atol=1e-5)


def test_only_an_open_runner_runs(backend: Backend) -> None:
    bundle, runner_of = backend
    engine = bundle.manifest.engines[0]
    runner, feeds = runner_of(bundle, engine), random_feeds(bundle.manifest.inputs, engine.bucket)
    with pytest.raises(BundleError, match=r"^engine ffn16@b1-s8: not open; run it inside its `with` block$"):
        runner.run(feeds)
    with runner:
        runner.run(feeds)
    for call in (lambda: runner.run(feeds), lambda: runner.bind(feeds, {})):
        with pytest.raises(BundleError, match="engine ffn16@b1-s8: not open"):
            call()


def test_outputs_are_the_callers(backend: Backend) -> None:
    bundle, runner_of = backend
    engine = bundle.manifest.engines[0]
    with runner_of(bundle, engine) as runner:
        first = runner.run(random_feeds(bundle.manifest.inputs, engine.bucket, 0))
        kept = [array.copy() for array in first]
        runner.run(random_feeds(bundle.manifest.inputs, engine.bucket, 1))
    for array, copy in zip(first, kept, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_a_bound_run_reads_and_writes_the_callers_arrays(backend: Backend, expected: Reference) -> None:
    bundle, runner_of = backend
    engine = bundle.manifest.engines[1]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    hidden = np.empty((4, 16, 16), np.float32)
    with runner_of(bundle, engine) as runner:
        run = runner.bind(feeds, {"hidden": hidden[1:3]})  # the other output is not fetched
        for seed in (0, 1):
            for name, array in random_feeds(bundle.manifest.inputs, engine.bucket, seed).items():
                feeds[name][...] = array
            hidden[:] = -1
            run()
            want = expected(16, feeds["input_ids"], feeds["attention_mask"])
            np.testing.assert_allclose(hidden[1:3], want["hidden"], rtol=1e-5, atol=1e-5)
            assert (hidden[[0, 3]] == -1).all()
    with pytest.raises(BundleError, match="engine ffn16@b2-s16: not open"):
        run()


def test_arrays_that_do_not_fit_are_refused_by_name(backend: Backend) -> None:
    bundle, runner_of = backend
    engine = bundle.manifest.engines[0]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    with runner_of(bundle, engine) as runner:
        runner.run({**feeds, "input_ids": np.asfortranarray(feeds["input_ids"])})
        with pytest.raises(InputError, match=r"input_ids: expected contiguous int64 \[1, 8\], got int32 \[1, 8\]$"):
            runner.bind({**feeds, "input_ids": feeds["input_ids"].astype(np.int32)}, {})
        with pytest.raises(InputError, match=r"total: expected contiguous float32 \[1, 16\], got float64 \[1, 16\]$"):
            runner.bind(feeds, {"total": np.empty((1, 16), np.float64)})
        with pytest.raises(InputError, match="no array for input attention_mask"):
            runner.bind({"input_ids": feeds["input_ids"]}, {})
        with pytest.raises(InputError, match=r"engine ffn16@b1-s8: has no output 'depth'; it has hidden, total"):
            runner.bind(feeds, {"depth": np.empty((1, 16), np.float32)})
