"""The runner on the processor's memory and kernels, which take the same calls as a GPU's; nothing here ran on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exit_bundles import weights, write_exits_bundle
from host_provider import host_provider
from nestforge.elastic import Bucket
from nestforge.errors import BundleCorruptError, BundleError, BundleIncompatibleError, InputError
from nestforge.runtime import onnxruntime_gpu_runner as module
from nestforge.runtime.bundle import Bundle, open_bundle
from nestforge.runtime.device import DeviceArray, HostDevice
from nestforge.runtime.device_store import StoreUse
from nestforge.runtime.feeds import random_feeds
from nestforge.runtime.manifest import EngineEntry
from nestforge.runtime.onnxruntime_gpu_runner import OnnxRuntimeGpuRunner
from nestforge.runtime.onnxruntime_gpu_session import GpuSession
from nestforge.runtime.runner import runner_for

Edit = Callable[[Path, Callable[[dict[str, Any]], object]], None]


@pytest.fixture
def bundle(tiny_bundle: Path) -> Bundle:
    return open_bundle(tiny_bundle)


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
    own = sum(runner._layout.bytes for runner in runners)
    assert device.allocated_bytes == use.store.bytes + own
    assert use.store.bytes == sum(array.nbytes for array in weights().values())
    for runner in runners:
        feeds = random_feeds(bundle.manifest.interface(runner.engine.segment)[0], runner.engine.bucket)
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


def test_outputs_and_bound_arrays_are_the_callers(bundle: Bundle, device: HostDevice) -> None:
    engine = bundle.manifest.engines[1]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    with runner_of(bundle, engine, device) as runner:
        hidden, _ = first = runner.run(feeds)
        kept = hidden.copy()
        target = np.zeros((4, *hidden.shape[1:]), np.float32)
        run = runner.bind(feeds, {"hidden": target[1:3]})  # the other output is not fetched
        for name, array in random_feeds(bundle.manifest.inputs, engine.bucket, 1).items():
            feeds[name][...] = array
        run()
        np.testing.assert_array_equal(target[1:3], runner.run(feeds)[0])
        assert not target[[0, 3]].any()
    np.testing.assert_array_equal(first[0], kept)
    with pytest.raises(BundleError, match="not open"):
        run()


def test_a_run_on_device_memory_reads_and_writes_there(bundle: Bundle, device: HostDevice) -> None:
    engine = bundle.manifest.engines[1]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    with runner_of(bundle, engine, device) as runner:
        bound = {}
        for name, array in feeds.items():
            bound[name] = DeviceArray(device.allocate(array.nbytes), str(array.dtype), array.shape)
        total = DeviceArray(device.allocate(2 * 16 * 4), "float32", (2, 16))
        run = runner.bind_device(bound, {"total": total})
        for name, array in feeds.items():
            device.to_device(bound[name].address, array)
        run()
        found = np.empty((2, 16), np.float32)
        device.to_host(found, total.address)
        np.testing.assert_array_equal(found, runner.run(feeds)[1])
        with pytest.raises(InputError, match=r"total: expected float32 \[2, 16\], got float32 \[1, 16\]"):
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


def test_threads_take_turns(bundle: Bundle, device: HostDevice) -> None:
    engine = bundle.manifest.engines[0]
    with runner_of(bundle, engine, device) as runner:
        known = {seed: runner.run(random_feeds(bundle.manifest.inputs, engine.bucket, seed)) for seed in range(4)}
        wrong: list[int] = []

        def work(seed: int) -> None:
            for _ in range(50):
                found = runner.run(random_feeds(bundle.manifest.inputs, engine.bucket, seed))
                wrong.extend([seed] * any(not np.array_equal(a, b) for a, b in zip(found, known[seed], strict=True)))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in known]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_what_does_not_fit_is_refused(bundle: Bundle, device: HostDevice) -> None:
    engine = bundle.manifest.engines[0]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    runner = runner_of(bundle, engine, device)
    with pytest.raises(BundleError, match=r"^engine ffn16@b1-s8: not open; run it inside its `with` block$"):
        runner.run(feeds)
    with runner:
        with pytest.raises(InputError, match=r"input_ids: expected contiguous int64 \[1, 8\], got int32 \[1, 8\]"):
            runner.run({**feeds, "input_ids": feeds["input_ids"].astype(np.int32)})
        with pytest.raises(InputError, match="engine ffn16@b1-s8: "):
            runner.run({**feeds, "input_ids": np.full((1, 8), 99)})
        runner.run(feeds)


def test_what_is_not_the_manifests_engine_is_refused(bundle: Bundle, device: HostDevice, own_bundle: Path) -> None:
    first, second = bundle.manifest.engines[:2]
    with pytest.raises(BundleCorruptError, match=r"engine ffn16@b1-s8: inputs are .*, the manifest says"):
        runner_of(bundle, replace(first, file=second.file), device).__enter__()
    damaged = open_bundle(own_bundle)
    damaged.file(first.file).write_bytes(b"\x80")
    with pytest.raises(BundleCorruptError, match="no ONNX file"):
        runner_of(damaged, first, device).__enter__()
    graph = onnx.load(bundle.file(first.file), load_external_data=False)
    del graph.graph.node[0]
    damaged.file(first.file).write_bytes(graph.SerializeToString())
    with pytest.raises(BundleError, match=r"onnxruntime 1.* \(host\) cannot open it: "):
        runner_of(damaged, first, device).__enter__()
    assert device.allocated_bytes == 0


class Recorded(GpuSession):
    """A session whose ``options`` are those of a GPU's; where they ask for a CUDA graph it may refuse."""

    refuses = ""
    opened: list[dict[str, str]]

    def __init__(self, path: Path, provider: Any, device: Any, views: Any, options: list[dict[str, str]]) -> None:
        self.opened.append(options[0])
        if options[0]["enable_cuda_graph"] == "1" and self.refuses == "open":
            raise BundleIncompatibleError(f"{path}: This session cannot use the graph capture feature")
        if self.refuses == "memory":
            raise BundleIncompatibleError(f"{path}: CUDA failure 2: out of memory")
        super().__init__(path, provider, HostDevice(), {n: replace(v, kind="cpu") for n, v in views.items()}, [{}])
        inner, refuses = self.session, self.refuses

        class Session:
            def __init__(self) -> None:
                self.graphs: list[str] = []

            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def release_captured_graph(self, number: int) -> None:
                self.graphs.append(f"release {number}")

            def run_with_iobinding(self, binding: Any, run: Any) -> None:
                number = run.get_run_config_entry("gpu_graph_id") if options[0]["enable_cuda_graph"] == "1" else "none"
                self.graphs.append(number)
                if number != "none" and refuses == "run":
                    raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
                if refuses == "memory in the first run":
                    raise RuntimeError("Failed to allocate memory for requested buffer of size 99")
                assert run.get_run_config_entry("disable_synchronize_execution_providers") == "1"
                inner.run_with_iobinding(binding, run)

        self.session = Session()


class Gpu(HostDevice):
    kind = "cuda"


def gpu_provider(gpu: Gpu) -> Any:
    return replace(host_provider(gpu), options=lambda _, capture, __: [{"enable_cuda_graph": str(int(capture))}])


REFUSALS = {
    "": None,
    "open": "This session cannot use the graph capture feature",
    "run": "CUDA failure 900: operation not permitted when stream is capturing",
}


@pytest.mark.parametrize("refuses", REFUSALS)
def test_runs_are_captured_where_onnx_runtime_captures_them(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    session = type("Session", (Recorded,), {"refuses": refuses, "opened": []})
    monkeypatch.setattr(module, "GpuSession", session)
    gpu, captured = Gpu(), not refuses
    provider = gpu_provider(gpu)
    engine = bundle.manifest.engines[0]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    with OnnxRuntimeGpuRunner(bundle, engine, provider) as runner, runner_for(bundle, engine, "shared", 1) as known:
        assert runner.is_captured is captured
        assert (runner.capture_refusal or "None").endswith(str(REFUSALS[refuses]))
        for mine, theirs in zip(runner.run(feeds), known.run(feeds), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert runner._session is not None
        assert runner._session.session.graphs == (["1", "1"] if captured else ["none", "none"])
        arrays = {n: DeviceArray(gpu.allocate(a.nbytes), str(a.dtype), a.shape) for n, a in feeds.items()}
        for name, array in feeds.items():
            gpu.to_device(arrays[name].address, array)
        total = DeviceArray(gpu.allocate(64), "float32", (1, 16))
        call = runner.bind_device(arrays, {"total": total})  # a graph of its own, for it has addresses of its own
        call()
        call.close()
        assert runner._session.session.graphs[2:] == (["2", "release 2"] if captured else ["none"])
        for array in (*arrays.values(), total):
            gpu.free(array.address)
    assert [options["enable_cuda_graph"] for options in session.opened] == (["1"] if captured else ["1", "0"])
    assert gpu.allocated_bytes == 0


@pytest.mark.parametrize("refuses", ["memory", "memory in the first run"])
def test_too_little_memory_is_no_reason_to_open_an_engine_without_a_graph(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    session = type("Session", (Recorded,), {"refuses": refuses, "opened": []})
    monkeypatch.setattr(module, "GpuSession", session)
    gpu = Gpu()
    with pytest.raises(BundleIncompatibleError, match=r"out of memory$|Failed to allocate memory for .* size 99$"):
        OnnxRuntimeGpuRunner(bundle, bundle.manifest.engines[0], gpu_provider(gpu)).__enter__()
    assert len(session.opened) == 1
    assert gpu.allocated_bytes == 0


def test_a_runner_forgets_calls_that_were_closed(bundle: Bundle, device: HostDevice) -> None:
    engine = bundle.manifest.engines[0]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    arrays = {n: DeviceArray(device.allocate(a.nbytes), str(a.dtype), a.shape) for n, a in feeds.items()}
    for name, array in feeds.items():
        device.to_device(arrays[name].address, array)
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
