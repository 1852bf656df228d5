"""Runs on memory of the caller's, on tests/support/fake_tensorrt.py: no plan is really run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from nestforge.bundle.open_bundle import Bundle
from nestforge.errors import BundleError, InputError
from nestforge.runtime.device.device import DeviceArray
from nestforge.runtime.inputs.arrays import random_feeds
from support.fake_cuda import World
from support.fake_gpu import arrays_on
from support.fake_tensorrt import list_plans


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
            assert runner._bound is not None
            assert runner._bound._runs == {first}
            assert len(freed) == captures * number
            with pytest.raises(BundleError, match="not open"):
                run()
        first()
        for array in arrays.values():
            runner.device.free(array.address)
    assert not world.allocated
