"""The runner on the processor's memory and kernels, which take the same calls as a GPU's; nothing here ran on a GPU."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleCorruptError, BundleError, BundleIncompatibleError, InputError
from nestforge.runtime.device.device import DeviceArray
from nestforge.runtime.device.store import StoreUse
from nestforge.runtime.engines.onnxruntime_gpu.runner import OnnxRuntimeGpuRunner
from nestforge.runtime.engines.runner import runner_for
from nestforge.runtime.inputs.arrays import random_feeds
from support.exit_bundles import weights, write_exits_bundle
from support.fake_gpu import (
    Gpu,
    HostDevice,
    PlayedGraph,
    arrays_on,
    host_provider,
    played_sessions,
    provider_on,
)
from support.sealing import reseal

Edit = Callable[[Path, Callable[[dict[str, Any]], object]], None]


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


def runner_of(bundle: Bundle, engine: EngineEntry, device: HostDevice) -> OnnxRuntimeGpuRunner:
    return OnnxRuntimeGpuRunner(bundle, engine, host_provider(device))


def test_every_engine_answers_as_the_ordinary_runner_does(bundle: Bundle, device: HostDevice) -> None:
    for engine in bundle.manifest.engines:
        with runner_of(bundle, engine, device) as runner, runner_for(bundle, engine, "shared", 1) as ordinary:
            for seed in (0, 1):
                feeds = random_feeds(bundle.manifest.inputs, engine.bucket, seed)
                for mine, known in zip(runner.run(feeds), ordinary.run(feeds), strict=True):
                    np.testing.assert_array_equal(mine, known)
            with pytest.raises(InputError, match=f"engine {engine.id}: "):
                runner.run({**feeds, "input_ids": np.full_like(feeds["input_ids"], 99)})
        assert device.allocated_bytes == 0


def test_eight_engines_are_views_of_one_copy_of_the_weights(tmp_path: Path, device: HostDevice) -> None:
    """All engines of three segments and two submodels are open at once; the store is there once, and is what answers.

    That sessions read the views in place is seen by changing the copy: all of them then answer otherwise.
    """
    bundle = open_bundle(write_exits_bundle(tmp_path / "b", [Bucket(1, 8), Bucket(4, 8)]))
    files = {engine.file: engine for engine in bundle.manifest.engines}
    runners = [runner_of(bundle, engine, device).__enter__() for engine in files.values()]
    assert len(runners) > 8
    use = StoreUse(bundle.file("weights.safetensors"), device)  # the one that they share
    own = sum(runner._layouts.largest.bytes for runner in runners)
    assert device.allocated_bytes == use.store.bytes + own
    assert use.store.bytes == sum(array.nbytes for array in weights().values())
    for runner in runners:
        feeds = random_feeds(bundle.manifest.interface_of(runner.engine)[0], runner.engine.bucket)
        feeds["attention_mask"][:] = 1
        before = runner.run(feeds)
        with device.lock:
            for (begin, end), address in use.store._addresses.items():
                device.to_device(address, np.full((end - begin) // 4, 3.25, np.float32))
        after = runner.run(feeds)
        assert not all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        for begin_end, address in use.store._addresses.items():
            raw = np.fromfile(bundle.file("weights.safetensors"), np.uint8)[slice(*begin_end)]
            device.to_device(address, raw)
    for runner in runners:
        runner.__exit__(None, None, None)
    use.close()
    assert device.allocated_bytes == 0


def test_a_run_on_device_memory_reads_and_writes_there(bundle: Bundle, device: HostDevice) -> None:
    engine = bundle.manifest.engines[1]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    with runner_of(bundle, engine, device) as runner:
        bound = arrays_on(device, {name: np.zeros_like(array) for name, array in feeds.items()})
        total = DeviceArray(device.allocate(2 * 16 * 4), "float32", (2, 16))
        run = runner.bind_device(bound, {"total": total})
        for name, array in feeds.items():
            device.to_device(bound[name].address, array)
        run()
        found = np.empty((2, 16), np.float32)
        device.to_host(found, total.address)
        np.testing.assert_array_equal(found, runner.run(feeds)[1])
        with pytest.raises(InputError, match=r"total: expected contiguous float32 \[2, 16\], got float32 \[1, 16\]"):
            runner.bind_device(bound, {"total": total.rows(0, 1)})
        with pytest.raises(InputError, match="no array for input attention_mask"):
            runner.bind_device({"input_ids": bound["input_ids"]}, {})
        with pytest.raises(InputError, match="has no output 'other'"):
            runner.bind_device(bound, {"other": total})
    with pytest.raises(BundleError, match="not open"):
        run()
    for array in (*bound.values(), total):
        device.free(array.address)
    assert device.allocated_bytes == 0


def test_what_is_not_the_manifests_engine_is_refused(bundle: Bundle, device: HostDevice, own_bundle: Path) -> None:
    first, second = bundle.manifest.engines[:2]
    with pytest.raises(BundleCorruptError, match=r"engine ffn16@b1-s8: inputs are .*, the manifest says"):
        runner_of(bundle, replace(first, file=second.file), device).__enter__()
    (own_bundle / first.file).write_bytes(b"\x80")
    reseal(own_bundle)
    damaged = open_bundle(own_bundle)
    with pytest.raises(BundleCorruptError, match="no ONNX file"):
        runner_of(damaged, first, device).__enter__()
    graph = onnx.load(bundle.file(first.file), load_external_data=False)
    del graph.graph.node[0]
    (own_bundle / first.file).write_bytes(graph.SerializeToString())
    reseal(own_bundle)
    damaged = open_bundle(own_bundle)
    with pytest.raises(BundleError, match=r"onnxruntime 1.* \(host\) cannot open it: "):
        runner_of(damaged, first, device).__enter__()
    assert device.allocated_bytes == 0


@pytest.mark.parametrize("refuses", ["", "CUDA: capturing a run: operation not permitted when stream is capturing"])
def test_runs_are_captured_where_they_can_be(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, refuses: str
) -> None:
    """A first request starts as a graph; each binding has one of its own, which goes with it."""
    session, captured = played_sessions(monkeypatch), not refuses
    gpu.refuses = refuses
    engine = bundle.manifest.engines[0]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    runner = OnnxRuntimeGpuRunner(bundle, engine, provider_on(gpu))
    with runner, runner_for(bundle, engine, "shared", 1) as known:
        assert runner.is_captured is captured
        assert runner.capture_refusal == (refuses or None)
        for mine, theirs in zip(runner.run(feeds), known.run(feeds), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert gpu.starts == (2 if captured else 0)  # one was compared with a run call by call
        arrays = arrays_on(gpu, feeds)
        total = DeviceArray(gpu.allocate(64), "float32", (1, 16))
        call = runner.bind_device(arrays, {"total": total})
        for _ in range(3):
            call()
        assert (len(gpu.graphs), gpu.starts) == ((2, 3) if captured else (0, 0))
        call.close()
        assert all(graph.is_closed for graph in gpu.graphs[1:])
        for array in (*arrays.values(), total):
            gpu.free(array.address)
    assert all(graph.is_closed for graph in gpu.graphs)
    assert [options["enable_cuda_graph"] for options in session.opened] == ["0"]


def test_a_graph_that_answers_otherwise_is_not_used(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """As where ONNX Runtime queues work in another stream: once, when it is captured, and never again."""
    played_sessions(monkeypatch)
    monkeypatch.setattr(PlayedGraph, "launch", lambda self: None)
    engine = bundle.manifest.engines[0]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    runner = OnnxRuntimeGpuRunner(bundle, engine, provider_on(gpu))
    with runner, runner_for(bundle, engine, "shared", 1) as known:
        assert (runner.is_captured, runner.capture_refusal) == (False, "as a graph a run answers otherwise")
        for mine, theirs in zip(runner.run(feeds), known.run(feeds), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_a_device_that_fails_is_given_back(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    played_sessions(monkeypatch)
    runner = OnnxRuntimeGpuRunner(bundle, bundle.manifest.engines[0], provider_on(gpu)).__enter__()
    released: list[None] = []
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "wait", lambda: (_ for _ in ()).throw(BundleError("CUDA: running the engine: lost")))
        patch.setattr(gpu, "release", lambda: released.append(None))
        with pytest.raises(BundleError, match="lost"):
            runner.__exit__(None, None, None)
    assert (released, gpu.allocated_bytes) == ([None], 0)
    assert all(graph.is_closed for graph in gpu.graphs)
    runner.__exit__(None, None, None)


def test_all_sessions_of_a_gpu_run_in_one_thread(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """ONNX Runtime keeps handles for each thread that runs a session."""
    played_sessions(monkeypatch)
    first, second = (OnnxRuntimeGpuRunner(bundle, e, provider_on(gpu)) for e in bundle.manifest.engines[:2])
    with first, second:

        def work(seed: int) -> None:
            runner = (first, second)[seed % 2]
            feeds = random_feeds(bundle.manifest.inputs, runner.engine.bucket, seed)
            known = runner.run(feeds)
            for _ in range(20):
                for mine, theirs in zip(runner.run(feeds), known, strict=True):
                    np.testing.assert_array_equal(mine, theirs)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        sessions: list[Any] = [runner._require_open()[1] for runner in (first, second)]
        assert len({ident for session in sessions for ident in session.threads}) == 1
        assert len(gpu.graphs) == 2
        assert threading.get_ident() not in sessions[0].threads


def test_tensorrt_inside_onnx_runtime_captures_nothing(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, tmp_path: Path
) -> None:
    """Whether what TensorRT queues can be captured has not been tried."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    session = played_sessions(monkeypatch)
    with OnnxRuntimeGpuRunner(bundle, bundle.manifest.engines[0], provider_on(gpu, "tensorrt")) as runner:
        assert not runner.is_captured
        assert runner.capture_refusal is None
    assert [options["trt_cuda_graph_enable"] for options in session.opened] == ["0"]


@pytest.mark.parametrize("refuses", ["memory", "memory in the first run"])
def test_too_little_memory_is_one_line(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, refuses: str) -> None:
    session = played_sessions(monkeypatch, refuses)
    with pytest.raises(BundleIncompatibleError, match=r"out of memory$|Failed to allocate memory for .* size 99$"):
        OnnxRuntimeGpuRunner(bundle, bundle.manifest.engines[0], provider_on(gpu)).__enter__()
    assert len(session.opened) == 1


def test_a_runner_forgets_calls_that_were_closed(bundle: Bundle, device: HostDevice) -> None:
    engine = bundle.manifest.engines[0]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    arrays = arrays_on(device, feeds)
    total = {"total": DeviceArray(device.allocate(64), "float32", (1, 16))}
    with runner_of(bundle, engine, device) as runner:
        first = runner.bind_device(arrays, total)
        kept = len(runner._bound)
        for _ in range(5):
            call = runner.bind_device(arrays, total)
            assert len(runner._bound) == kept + 1
            call.close()
            assert len(runner._bound) == kept
        with pytest.raises(BundleError, match=r"^engine ffn16@b1-s8: not open"):
            call()
        first()
    assert not runner._bound
    first.close()
