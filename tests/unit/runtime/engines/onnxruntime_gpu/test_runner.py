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
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleCorruptError, BundleError, BundleIncompatibleError, InputError
from nestforge.runtime.device.device import DeviceArray
from nestforge.runtime.device.store import StoreUse
from nestforge.runtime.engines.onnxruntime_gpu import runner as module
from nestforge.runtime.engines.onnxruntime_gpu.runner import OnnxRuntimeGpuRunner
from nestforge.runtime.engines.runner import runner_for
from nestforge.runtime.inputs.arrays import random_feeds
from support.exit_bundles import weights, write_exits_bundle
from support.fake_gpu import (
    CapturingSession,
    Gpu,
    HostDevice,
    arrays_on,
    capturing_sessions,
    host_provider,
    provider_on,
)
from support.sealing import reseal

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


REFUSALS = {
    "": None,
    "open": "This session cannot use the graph capture feature",
    "run": "CUDA failure 900: operation not permitted when stream is capturing",
}


@pytest.mark.parametrize("refuses", REFUSALS)
def test_runs_are_captured_where_onnx_runtime_captures_them(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, refuses: str
) -> None:
    session, captured = capturing_sessions(monkeypatch, refuses), not refuses
    engine = bundle.manifest.engines[0]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    runner = OnnxRuntimeGpuRunner(bundle, engine, provider_on(gpu))
    with runner, runner_for(bundle, engine, "shared", 1) as known:
        assert runner.is_captured is captured
        assert (runner.capture_refusal or "None").endswith(str(REFUSALS[refuses]))
        for mine, theirs in zip(runner.run(feeds), known.run(feeds), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        opened = runner._session
        assert isinstance(opened, CapturingSession)
        assert opened.calls == (["1", "1"] if captured else ["none", "none"])
        arrays = arrays_on(gpu, feeds)
        total = DeviceArray(gpu.allocate(64), "float32", (1, 16))
        call = runner.bind_device(arrays, {"total": total})  # a graph of its own, for it has addresses of its own
        call()
        call.close()
        assert opened.calls[2:] == (["2"] if captured else ["none"])
        for array in (*arrays.values(), total):
            gpu.free(array.address)
    assert [options["enable_cuda_graph"] for options in session.opened] == (["1"] if captured else ["1", "0"])
    # A refused run's remains are ended before its session closes; one that never ran leaves nothing.
    assert gpu.ended == (refuses == "run")


def test_a_session_keeps_a_bounded_number_of_graphs(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """ONNX Runtime releases none before a session closes: the same places get the same one, however often they are
    bound, and places beyond the bound are run call by call. All answer from where they were bound."""
    monkeypatch.setattr(module, "_MAX_CAPTURED_GRAPHS", 3)
    capturing_sessions(monkeypatch)
    engine = bundle.manifest.engines[0]
    seeds = range(4)
    cases = [random_feeds(bundle.manifest.inputs, engine.bucket, seed) for seed in seeds]
    placed = [arrays_on(gpu, feeds) for feeds in cases]
    totals = [DeviceArray(gpu.allocate(64), "float32", (1, 16)) for _ in seeds]
    with OnnxRuntimeGpuRunner(bundle, engine, provider_on(gpu)) as runner:
        wanted = [runner.run(feeds)[1] for feeds in cases]
        opened = runner._session
        assert isinstance(opened, CapturingSession)
        for _ in range(3):
            opened.calls.clear()
            for seed in seeds:
                call = runner.bind_device(placed[seed], {"total": totals[seed]})
                call()
                found = np.empty((1, 16), np.float32)
                gpu.to_host(found, totals[seed].address)
                np.testing.assert_array_equal(found, wanted[seed])
                call.close()
            assert opened.calls == ["2", "3", "-1", "-1"]
        assert len(opened.graphs) == 3
    for array in (*totals, *(array for arrays in placed for array in arrays.values())):
        gpu.free(array.address)


def test_all_sessions_of_a_gpu_run_in_one_thread(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """ONNX Runtime keeps graphs and handles for each thread that runs a session."""
    capturing_sessions(monkeypatch)
    first, second = (OnnxRuntimeGpuRunner(bundle, e, provider_on(gpu)) for e in bundle.manifest.engines[:2])
    wrong: list[int] = []
    with first, second:

        def work(seed: int) -> None:
            runner = (first, second)[seed % 2]
            feeds = random_feeds(bundle.manifest.inputs, runner.engine.bucket, seed)
            known = runner.run(feeds)
            for _ in range(20):
                wrong.extend(
                    [seed] * any(not np.array_equal(a, b) for a, b in zip(runner.run(feeds), known, strict=True))
                )

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sessions = [runner._session for runner in (first, second)]
        assert not wrong
        assert len({ident for session in sessions for ident in session.threads}) == 1  # type: ignore[union-attr]
        assert [len(session.graphs) for session in sessions] == [1, 1]  # type: ignore[union-attr]
        assert threading.get_ident() not in sessions[0].threads  # type: ignore[union-attr]


def test_tensorrt_inside_onnx_runtime_captures_nothing(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, tmp_path: Path
) -> None:
    """Its sessions keep one graph, and would start it for any other binding: see the chains."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    session = capturing_sessions(monkeypatch)
    with OnnxRuntimeGpuRunner(bundle, bundle.manifest.engines[0], provider_on(gpu, "tensorrt")) as runner:
        assert not runner.is_captured
        assert runner.capture_refusal is None
    assert [options["trt_cuda_graph_enable"] for options in session.opened] == ["0"]


@pytest.mark.parametrize("refuses", ["memory", "memory in the first run"])
def test_too_little_memory_is_no_reason_to_open_an_engine_without_a_graph(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, refuses: str
) -> None:
    session = capturing_sessions(monkeypatch, refuses)
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
