"""Engines of a range on the processor's memory and kernels, which take the same calls as a GPU's; none ran on a GPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleIncompatibleError
from nestforge.runtime.device.device import DeviceArray
from nestforge.runtime.device.store import StoreUse
from nestforge.runtime.engines.onnxruntime_gpu.provider import PROVIDERS, require_on_device
from nestforge.runtime.engines.onnxruntime_gpu.runner import OnnxRuntimeGpuRunner
from nestforge.runtime.engines.onnxruntime_gpu.session import GpuSession
from nestforge.runtime.engines.runner import runner_for
from nestforge.runtime.inputs.arrays import random_feeds
from support.fake_gpu import Gpu, HostDevice, arrays_on, host_provider, played_sessions, provider_on
from support.small_bundle import RANGE_SHAPES as SHAPES


@pytest.fixture
def bundle(range_bundle: Path) -> Bundle:
    return open_bundle(range_bundle)


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


def runner_of(bundle: Bundle, device: HostDevice) -> OnnxRuntimeGpuRunner:
    return OnnxRuntimeGpuRunner(bundle, bundle.manifest.engines[0], host_provider(device))


def test_every_shape_is_answered_in_memory_for_the_largest(bundle: Bundle, device: HostDevice) -> None:
    with runner_of(bundle, device) as runner:
        use = StoreUse(bundle.file("weights.safetensors"), device)
        assert device.allocated_bytes == use.store.bytes + runner._layouts.largest.bytes
        for seed, shape in enumerate(SHAPES):
            runner.run(random_feeds(bundle.manifest.inputs, shape, seed))
        assert device.allocated_bytes == use.store.bytes + runner._layouts.largest.bytes
        assert len(runner._bound) == 1  # the binding of the last shape
        use.close()
    assert device.allocated_bytes == 0


def test_a_run_on_device_memory_keeps_its_shape_whatever_runs_between(bundle: Bundle, device: HostDevice) -> None:
    feeds = random_feeds(bundle.manifest.inputs, Bucket(2, 5))
    total = np.empty((2, 16), np.float32)
    with runner_of(bundle, device) as runner:
        known = runner.run(feeds)[1]
        arrays = arrays_on(device, feeds)
        there = DeviceArray(device.allocate(total.nbytes), "float32", total.shape)
        queued = runner.bind_device(arrays, {"total": there})
        for seed in (1, 2):
            runner.run(random_feeds(bundle.manifest.inputs, Bucket(4, 16), seed))
            total[:] = -1
            device.to_device(there.address, total)
            queued()
            device.to_host(total, there.address)
            np.testing.assert_array_equal(total, known)
        for array in (*arrays.values(), there):
            device.free(array.address)


def test_a_shape_that_comes_again_and_again_is_captured_and_started_for_no_other(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: Gpu
) -> None:
    played_sessions(monkeypatch)
    engine = bundle.manifest.engines[0]
    with (
        OnnxRuntimeGpuRunner(bundle, engine, provider_on(gpu)) as runner,
        runner_for(bundle, engine, "shared", 1) as known,
    ):
        assert (runner.is_captured, runner.capture_refusal) == (False, None)
        for seed, shape in enumerate(one for one in SHAPES for _ in range(times(one))):
            feeds = random_feeds(bundle.manifest.inputs, shape, seed)
            for mine, theirs in zip(runner.run(feeds), known.run(feeds), strict=True):
                np.testing.assert_array_equal(mine, theirs)
    assert gpu.starts
    assert all(graph.is_closed for graph in gpu.graphs)


def times(shape: Bucket) -> int:
    """How often in a row it is requested: one to four times."""
    return 1 + shape.tokens % 4


def test_tensorrt_inside_onnx_runtime_gets_the_ends_of_the_range(
    bundle: Bundle, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    session = played_sessions(monkeypatch)
    for opened in (bundle, open_bundle(tiny_bundle)):
        with OnnxRuntimeGpuRunner(opened, opened.manifest.engines[0], provider_on(gpu, "tensorrt")):
            pass
    told = [{name: text for name, text in options.items() if "shapes" in name} for options in session.opened]
    assert told == [
        {
            "trt_profile_min_shapes": "input_ids:1x2,attention_mask:1x2",
            "trt_profile_opt_shapes": "input_ids:1x16,attention_mask:1x16",
            "trt_profile_max_shapes": "input_ids:4x16,attention_mask:4x16",
        },
        {},
    ]
    first, *_ = bundle.manifest.engines
    provider = PROVIDERS["tensorrt"]
    folders = [
        provider.cache_folder(bundle, SimpleNamespace(file=first.file, bucket=bucket))
        for bucket in (first.bucket, Bucket(4, 32, 1, 2))
    ]
    assert len(set(folders)) == 2


def recorded(**nodes: list[tuple[str, str]]) -> Any:
    """A session that put these nodes (name, operator) on each provider."""
    parts = [
        SimpleNamespace(
            ep_name=f"{name}ExecutionProvider",
            get_nodes=lambda given=given: [SimpleNamespace(name=node, op_type=kind) for node, kind in given],
        )
        for name, given in nodes.items()
    ]
    return SimpleNamespace(get_provider_graph_assignment_info=lambda: parts)


def test_only_sizes_are_computed_on_the_processor() -> None:
    cuda = PROVIDERS["cuda"]
    sizes = [("n1", "Shape"), ("n2", "Gather"), ("n3", "Concat")]
    require_on_device("here", recorded(CUDA=[("n4", "MatMul")], CPU=sizes), cuda)
    with pytest.raises(BundleIncompatibleError) as raised:
        require_on_device("here", recorded(CUDA=[("n4", "MatMul")], CPU=[*sizes, ("n5", "Erf"), ("n6", "Erf")]), cuda)
    assert str(raised.value) == (
        "here: onnxruntime has no kernel for Erf on provider cuda, and would run 2 nodes on the processor; "
        "use provider cpu"
    )


def test_onnx_runtime_says_where_each_node_runs(bundle: Bundle, device: HostDevice) -> None:
    """The record that the check reads, of a session on the processor: what runs there is refused for a GPU."""
    path = bundle.file(bundle.manifest.engines[0].file)
    session = GpuSession(path, host_provider(device), device, {}, [{}], is_range=True).session
    expected = "no kernel for Gemm, ReduceSum, Relu on provider cuda, and would run 4 nodes on the processor"
    with pytest.raises(BundleIncompatibleError, match=expected):
        require_on_device("here", session, PROVIDERS["cuda"])
