"""KV-cache plans in memory of the caller's, on tests/support/fake_tensorrt.py: no plan is really run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.graph.precision.proof_graphs import proof_bundle
from nestforge.errors import BundleCorruptError, BundleError, InputError
from nestforge.runtime.device.device import DeviceArray, DeviceCall
from nestforge.runtime.engines.onnxruntime.runner import OnnxRuntimeRunner
from nestforge.runtime.engines.runner import CacheRunner, Runner, runner_for
from nestforge.runtime.generation.cache import Cache
from nestforge.runtime.generation.cache_memory import DeviceCache, DeviceSource
from nestforge.runtime.generation.cached_engine import CachedEngine
from support.fake_cuda import World
from support.generating import NARROW, generating_folder, played_gpu, source_folder

if TYPE_CHECKING:
    from nestforge.runtime.engines.tensorrt.cached_runner import TensorRTCacheRunner

PLACES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generating_folder(tmp_path_factory)


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with played_gpu(folder) as found:
        yield found


@pytest.fixture
def bundle(folder: Path) -> Bundle:
    return open_bundle(folder / "plans")


def opened(bundle: Bundle) -> TensorRTCacheRunner:
    """The runner of the narrow submodel's plan with room for 40 tokens."""
    from nestforge.runtime.engines.tensorrt.cached_runner import TensorRTCacheRunner

    generation = bundle.manifest.generation
    engine = next(one for one in generation.engines if (one.submodel, one.capacity) == (NARROW, PLACES))
    runner = runner_for(bundle, engine, "packed", 1)
    assert isinstance(runner, TensorRTCacheRunner)
    return runner


def feeds_of(rows: int, tokens: int, wanted: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Inputs beside the cache, and room for the logits."""
    ids = np.ones((rows, tokens), np.int64)
    places = np.broadcast_to(np.arange(tokens), (rows, tokens)).copy()
    feeds = {"input_ids": ids, "position_ids": places, "logits_at": np.arange(wanted)}
    return feeds, {"logits": np.zeros((rows, wanted, 64), np.float32)}


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """Two sessions sum products in their own order."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_runs_of_both_profiles_equal_the_graph_and_are_captured_where_they_repeat(bundle: Bundle, world: World) -> None:
    generation = bundle.manifest.generation
    rng, text = np.random.default_rng(0), list(range(30))
    with opened(bundle) as plan, proof_bundle(bundle) as here:
        engine, entry = plan.engine, generation.of(plan.engine)
        assert isinstance(plan, CacheRunner)
        there = DeviceCache.empty(entry.layers, 2, PLACES, plan.device)
        own = replace(engine, backend="onnxruntime")
        with OnnxRuntimeRunner(here, own, "shared", 1) as graph:
            kinds: tuple[tuple[Runner, Any], ...] = (
                (plan, there),
                (graph, Cache.empty(entry.layers, 2, PLACES, None, PLACES)),
            )
            mine, known = (CachedEngine(runner, engine, entry, cache) for runner, cache in kinds)
            world.calls.clear()
            for row in (0, 1):  # 30 tokens are a chunk
                wanted = [0, 7, 29]
                assert_close(mine.extend(row, text, 0, wanted), known.extend(row, text, 0, wanted))
            assert [call for call in world.calls if call.startswith("profile")] == ["profile 1"]
            for position in range(30, 36):
                tokens = rng.integers(0, 64, 2)
                assert_close(mine.step(tokens, [position] * 2).copy(), known.step(tokens, [position] * 2))
            assert [call for call in world.calls if call in ("run", "graph")][2:] == [
                *("run", "run"),
                *("graph", "run") * 4,
            ]
            single = [CachedEngine(runner, engine, entry, cache.part(0, 1)) for runner, cache in kinds]
            for start in (36, 33, 36):  # what is judged is overwritten
                drafted = rng.integers(0, 64, 4).tolist()
                found, expected = (one.check(drafted, start).copy() for one in single)
                assert_close(found, expected)
            for number in range(4):
                for row in (0, 1):
                    assert_close(*(cache.read(number, row, 0, PLACES) for _, cache in kinds))
            for one in (mine, single[0]):
                one.close()
        there.close()


def test_a_run_that_reads_a_prompt_is_not_captured_and_outlives_memory_that_moves(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = source_folder(tmp_path_factory) / "t5"
    with played_gpu(folder) as world:
        bundle = open_bundle(folder / "plans")
        entry = bundle.manifest.generation
        engine = entry.encoder_of(entry.engines[0])
        assert engine is not None
        runner = runner_for(bundle, engine, "packed", 1)
        assert isinstance(runner, CacheRunner)
        own = entry.of(engine)
        with runner, ExitStack() as opened:

            def bound(tokens: int) -> tuple[DeviceCall, DeviceArray]:
                source = DeviceSource.empty(own, 1, tokens, runner.device)
                opened.callback(source.close)
                ids = np.arange(5, 5 + tokens)[None] % 64
                return runner.bind_cache({"input_ids": ids}, {}, source.named()), source.tensors[0]

            def answer(keys: DeviceArray) -> np.ndarray:
                found = np.empty(keys.shape, np.float32)
                runner.device.to_host(found, keys.address)
                runner.device.clear_rows(keys.address, keys.bytes, keys.bytes, 1)
                return found

            (short, keys), (long, _) = bound(9), bound(600)
            short()
            known = answer(keys)
            assert known.any()
            for call in (short, short, long, long, short):
                call()
            assert "graph" not in world.calls
            np.testing.assert_array_equal(answer(keys), known)
            source = DeviceSource.empty(own, 1, 8, runner.device)
            opened.callback(source.close)
            too_long, other = (
                "expected one within 1x1..4096",
                r"source_key_0: expected float32 \[1, 3, 8, 9\], got float32",
            )
            for tokens, line in ((4097, too_long), (9, other)):
                with pytest.raises(InputError, match=line):
                    runner.bind_cache({"input_ids": np.ones((1, tokens), np.int64)}, {}, source.named())


def test_nothing_runs_while_a_run_is_bound(bundle: Bundle, world: World) -> None:
    with opened(bundle) as plan:
        cache = DeviceCache.empty(bundle.manifest.generation.of(plan.engine).layers, 1, PLACES, plan.device)
        world.calls.clear()
        run = cache.bind(plan, *feeds_of(1, 1, 1))
        assert world.calls == []
        run.close()
        run.close()
        with pytest.raises(BundleError, match="not open"):
            run.call()
        cache.close()


def test_a_run_ends_with_its_runner(bundle: Bundle, world: World) -> None:
    with opened(bundle) as plan:
        device = plan.device
        cache = DeviceCache.empty(bundle.manifest.generation.of(plan.engine).layers, 1, PLACES, device)
        run = cache.bind(plan, *feeds_of(1, 1, 1))
        for _ in range(3):
            run.call()
        cache.close()
    with pytest.raises(BundleError, match=r"cached40@b1_64-s1_40: not open"):
        run.call()
    with pytest.raises(BundleError, match="not open"):
        plan.inspect()


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((65, 1, 1), "expected one within 1..64x1..9, 1..1x1..40"),
        ((2, 10, 1), "expected one within 1..64x1..9, 1..1x1..40"),
        ((1, 41, 1), "expected one within 1..64x1..9, 1..1x1..40"),
        ((2, 1, 1), r"past_key_0: expected float32 \[2, 3, 40, 8\], got float32 \[1, 3, 40, 8\]"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(
    bundle: Bundle, world: World, sizes: tuple[int, int, int], line: str
) -> None:
    with opened(bundle) as plan:
        cache = DeviceCache.empty(bundle.manifest.generation.of(plan.engine).layers, 1, PLACES, plan.device)
        with pytest.raises(InputError, match=line):
            cache.bind(plan, *feeds_of(*sizes))
        with pytest.raises(InputError, match="caches are ; it has past_key_0, past_value_0"):
            plan.bind_cache(*feeds_of(1, 1, 1), {})
        with pytest.raises(InputError, match="logits: expected contiguous float32"):
            cache.bind(plan, feeds_of(1, 1, 1)[0], {"logits": np.zeros((1, 2, 64), np.float32)})
        for call in (plan.run, lambda feeds: plan.bind(feeds, {})):
            with pytest.raises(InputError, match="its cache lies on the GPU; run it in a session of its model"):
                call({})
        cache.close()


def test_a_plan_that_updates_no_cache_in_place_is_refused(bundle: Bundle, world: World) -> None:
    world.shares = False
    with pytest.raises(BundleCorruptError, match=r"present_key_0: shares the memory of no input, expected past_key_0"):
        opened(bundle).__enter__()


@pytest.mark.parametrize(
    ("call", "answer", "line"),
    [
        ("set_optimization_profile_async", False, "TensorRT refused optimisation profile 1"),
        ("set_input_shape", False, r"TensorRT refused shape \[1, 12\] of input_ids"),
        ("infer_shapes", ["logits"], "TensorRT does not know the shape of logits"),
        ("get_tensor_shape", (1, 2, 3), r"logits: expected shape \[1, 1, 64\], got \[1, 2, 3\]"),
        ("set_tensor_address", False, "TensorRT refused the memory of input_ids"),
        ("execute_async_v3", False, "TensorRT refused to run"),
    ],
)
def test_what_tensorrt_refuses_is_one_line(
    bundle: Bundle, world: World, monkeypatch: pytest.MonkeyPatch, call: str, answer: Any, line: str
) -> None:
    with opened(bundle) as plan:
        cache = DeviceCache.empty(bundle.manifest.generation.of(plan.engine).layers, 1, PLACES, plan.device)
        run = cache.bind(plan, *feeds_of(1, 12, 1))
        monkeypatch.setattr(type(plan._context._context), call, lambda *_: answer)
        with pytest.raises(BundleError, match=line):
            run.call()
        cache.close()


def test_a_context_that_is_not_opened_leaves_nothing(
    bundle: Bundle, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(bundle) as plan:
        kind = type(plan._opened)
    monkeypatch.setattr(kind, "create_execution_context", lambda *_: None)
    with pytest.raises(BundleError, match="TensorRT opened no context; the GPU may have too little free memory"):
        opened(bundle).__enter__()
