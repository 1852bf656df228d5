"""The contract of runners, which every back end keeps, which engines run where, and pools of runners."""

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleError, BundleIncompatibleError, InputError
from nestforge.profiles.backends import BACKENDS
from nestforge.profiles.precision import Precision
from nestforge.runtime.engines import onnxruntime
from nestforge.runtime.engines import runner as engine_runner
from nestforge.runtime.engines.onnxruntime_gpu.runner import OnnxRuntimeGpuRunner
from nestforge.runtime.engines.runner import EnginePool, Runner, opener, runnable_engines, runner_for
from nestforge.runtime.inputs.arrays import random_feeds
from support.fake_gpu import HostDevice, host_provider
from support.fake_tensorrt import host_with_gpu, list_plans
from support.small_bundle import RANGE_SHAPES

Reference = Callable[..., dict[str, Any]]


def on_gpu(bundle: Bundle, engine: EngineEntry) -> Runner:
    return OnnxRuntimeGpuRunner(bundle, engine, host_provider(HostDevice()))


def ordinary(bundle: Bundle, engine: EngineEntry) -> Runner:
    return runner_for(bundle, engine, "packed", 1)


Backend = tuple[Bundle, Callable[[Bundle, EngineEntry], Runner]]
ON_A_GPU = "onnxruntime on a GPU"


@contextmanager
def prepared(backend: str, folder: Path, tmp_path: Path) -> Iterator[Backend]:
    """The bundle in ``folder`` for one back end, and what makes its runners."""
    if backend == ON_A_GPU:
        yield open_bundle(folder), on_gpu
    elif BACKENDS[backend].runs_graphs:
        pytest.importorskip(BACKENDS[backend].module)
        bundle = open_bundle(folder)
        engines = tuple(replace(engine, backend=BACKENDS[backend].name) for engine in bundle.manifest.engines)
        yield replace(bundle, manifest=replace(bundle.manifest, engines=engines)), ordinary
    else:
        with host_with_gpu(tmp_path / "cache"):
            yield list_plans(folder, tmp_path / "plans.bundle"), ordinary


@pytest.fixture(params=[*BACKENDS, ON_A_GPU])
def backend(request: pytest.FixtureRequest, tiny_bundle: Path, tmp_path: Path) -> Iterator[Backend]:
    with prepared(request.param, tiny_bundle, tmp_path) as found:
        yield found


@pytest.fixture(params=[*BACKENDS, ON_A_GPU])
def ranged(request: pytest.FixtureRequest, range_bundle: Path, tmp_path: Path) -> Iterator[Backend]:
    """Of engines that take 1 to 4 rows of 2 to 16 steps."""
    with prepared(request.param, range_bundle, tmp_path) as found:
        yield found


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


def test_a_range_takes_every_shape_on_several_threads_at_once(ranged: Backend, expected: Reference) -> None:
    bundle, runner_of = ranged
    engine = bundle.manifest.engines[0]
    asked = [random_feeds(bundle.manifest.inputs, shape, seed) for seed, shape in enumerate(RANGE_SHAPES)]
    for feeds in asked:
        for array in feeds.values():
            array.flags.writeable = False
    with runner_of(bundle, engine) as runner, ThreadPoolExecutor(3) as threads:
        for feeds, (hidden, total) in zip(3 * asked, threads.map(runner.run, 3 * asked), strict=True):
            want = expected(int(engine.submodel[3:]), feeds["input_ids"], feeds["attention_mask"])
            np.testing.assert_allclose(hidden, want["hidden"], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(total, want["total"], rtol=1e-5, atol=1e-5)


def test_a_bound_run_keeps_its_shape_whatever_runs_between(ranged: Backend) -> None:
    bundle, runner_of = ranged
    with runner_of(bundle, bundle.manifest.engines[0]) as runner:
        for shape in (Bucket(1, 2), Bucket(2, 5), Bucket(4, 16)):
            feeds, total = random_feeds(bundle.manifest.inputs, shape), np.empty((shape.batch, 16), np.float32)
            known, call = runner.run(feeds)[1], runner.bind(feeds, {"total": total})
            for other in (Bucket(4, 16), Bucket(1, 3)):
                runner.run(random_feeds(bundle.manifest.inputs, other, 1))
                total[:] = -1
                call()
                np.testing.assert_allclose(total, known, rtol=1e-5, atol=1e-5)


def test_what_the_range_does_not_hold_is_refused(ranged: Backend) -> None:
    bundle, runner_of = ranged
    engine = bundle.manifest.engines[0]
    with runner_of(bundle, engine) as runner:
        for shape, nearest in ((Bucket(5, 8), [4, 8]), (Bucket(1, 17), [1, 16]), (Bucket(2, 1), [2, 2])):
            feeds = random_feeds(bundle.manifest.inputs, shape)
            with pytest.raises(InputError) as raised:
                runner.bind(feeds, {})
            assert str(raised.value) == (
                f"engine {engine.id}: input_ids: expected contiguous int64 {nearest}, got int64 "
                f"[{shape.batch}, {shape.sequence}]"
            )


def with_engines(bundle: Bundle, *engines: EngineEntry) -> Bundle:
    return replace(bundle, manifest=replace(bundle.manifest, engines=engines))


@pytest.mark.parametrize("precision", ["int8", "int8-dynamic", "int4"])
def test_a_provider_leaves_out_integers_that_only_the_processor_multiplies(
    bundle: Bundle, precision: Precision
) -> None:
    first, *others = bundle.manifest.engines
    some = with_engines(bundle, replace(first, precision=precision), *others)
    assert runnable_engines(some) == some.manifest.engines
    assert runnable_engines(some, host_provider()) == some.manifest.engines[1:]
    every = with_engines(bundle, *(replace(engine, precision=precision) for engine in bundle.manifest.engines))
    with pytest.raises(BundleIncompatibleError) as error:
        runnable_engines(every, host_provider())
    assert str(error.value) == (
        f"bundle {bundle.path}: provider host runs none of its engines, whose kernels for {precision} are a "
        "processor's; use provider cpu, or compile it with fp32 or fp16"
    )


def test_a_provider_runs_graphs_for_tensorrt_whatever_their_precision(bundle: Bundle) -> None:
    precisions: tuple[Precision, ...] = ("int8", "bf16", "fp16", "fp32")
    pairs = zip(bundle.manifest.engines, precisions, strict=False)
    graphs = with_engines(bundle, *(replace(one, backend="tensorrt", precision=name) for one, name in pairs))
    assert {engine.precision for engine in graphs.manifest.engines} >= {"int8", "bf16"}
    assert runnable_engines(graphs, host_provider()) == graphs.manifest.engines


@pytest.mark.parametrize("name", BACKENDS)
def test_every_back_end_has_an_opener(name: str) -> None:
    here = opener(name)
    for part in ("problem", "open_runner", "described"):
        assert inspect.signature(getattr(here, part)) == inspect.signature(getattr(onnxruntime, part)).replace(
            return_annotation=inspect.signature(getattr(here, part)).return_annotation
        )
    assert here.take_device is None or callable(here.take_device)


def test_this_host_has_onnx_runtime_and_another_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opener("onnxruntime").problem() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert opener("onnxruntime").problem() == "onnxruntime is not installed; install nestforge[cpu]"


def test_engines_of_one_file_are_opened_once(exits_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = engine_runner.runner_for

    def counting(bundle: Any, engine: Any, *rest: Any) -> Any:
        opened.append(engine.file)
        return real(bundle, engine, *rest)

    monkeypatch.setattr(engine_runner, "runner_for", counting)
    bundle = open_bundle(exits_bundle)
    pool = EnginePool(bundle, {engine.id: "shared" for engine in bundle.manifest.engines}, 1)
    by_file: dict[str, set[int]] = {}
    for engine in bundle.manifest.engines:
        by_file.setdefault(engine.file, set()).add(id(pool.get(engine)))
    assert sorted(opened) == sorted(by_file)
    assert all(len(runners) == 1 for runners in by_file.values())
    assert len(opened) < len(bundle.manifest.engines)
    pool.close()
    with pytest.raises(BundleError, match="the model is closed"):
        pool.get(bundle.manifest.engines[0])
