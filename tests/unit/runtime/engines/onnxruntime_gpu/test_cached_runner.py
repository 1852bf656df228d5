"""Engines that generate, on the processor's memory and kernels in the place of a GPU's; nothing here ran on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleError, BundleIncompatibleError, InputError
from nestforge.runtime.engines.onnxruntime_gpu.cached_runner import OnnxRuntimeGpuCacheRunner
from nestforge.runtime.generation.cached_engine import CachedEngine
from nestforge.runtime.generation.device_cache import DeviceCache
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.fake_gpu import Gpu, played_sessions, provider_on
from support.generating import NARROW, generating_folder, requests_of, require_same_texts, source_folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generating_folder(tmp_path_factory)


@pytest.fixture(scope="module", params=["decoder", "pair"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder, and an encoder with its decoder: graphs for TensorRT, and what is for the processor."""
    return (
        generating_folder(tmp_path_factory) if request.param == "decoder" else source_folder(tmp_path_factory) / "pair"
    )


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    played_sessions(monkeypatch)


def on_gpu(bundle: Bundle, gpu: Gpu) -> ElasticModel:
    held: dict[str, Any] = dict.fromkeys((engine.id for engine in bundle.manifest.engines), "shared")
    return ElasticModel(bundle, held, 1, provider_on(gpu))


@pytest.mark.usefixtures("played")
def test_text_is_the_processors(folder: Path, gpu: Gpu) -> None:
    """Rows that leave, moves between capacities, drafts and another submodel; steps start as graphs."""
    prompts = [[5, 7, 9], [3] * 2, list(range(1, 7))]
    with on_gpu(open_bundle(folder / "graphs"), gpu) as model, load(folder / "processor", threads=1) as known:
        narrow = model.bundle.manifest.largest_first[-1].id
        require_same_texts(model, known, requests_of(prompts, narrow, (17, 12, 12), 3))
        assert gpu.starts > 20
    assert all(graph.is_closed for graph in gpu.graphs)


def test_an_engine_that_answers_otherwise_than_the_processor_is_refused(
    folder: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    played_sessions(monkeypatch, off_by=0.001)
    bundle = open_bundle(folder / "graphs")
    assert bundle.manifest.generation is not None
    for engine in bundle.manifest.generation.every_engine:
        with pytest.raises(BundleIncompatibleError, match=rf"^engine {engine.id}: on this GPU \w+ of a chunk is off"):
            OnnxRuntimeGpuCacheRunner(bundle, engine, provider_on(gpu), 1).__enter__()
    assert gpu.allocated_bytes == 0


@pytest.mark.usefixtures("played")
def test_a_run_is_bound_to_a_cache_of_its_own_and_ends_with_its_runner(
    decoder: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(decoder / "graphs")
    entry = bundle.manifest.generation
    assert entry is not None
    engine = next(one for one in entry.engines if (one.submodel, one.capacity) == (NARROW, 40))
    own = entry.of(engine)
    runner = OnnxRuntimeGpuCacheRunner(bundle, engine, provider_on(gpu), 1)
    with runner:
        cache = DeviceCache.empty(own.layers, 2, 40, runner.device)
        bound = CachedEngine(runner, engine, own, cache)
        step = bound._step.call
        for turn in range(4):
            bound.step([1, 2], [0, 0])
            assert step.is_captured is (turn > 0)  # type: ignore[attr-defined]
        with pytest.raises(InputError, match="its cache lies on the GPU; run it in a session of its model"):
            runner.run({})
        with pytest.raises(InputError, match="its cache lies on the GPU; run it in a session of its model"):
            runner.bind({}, {})
        named = {name: array.rows(0, 1) for name, array in cache.named("past_").items()}
        ids = {"input_ids": np.zeros((2, 1), np.int64), "position_ids": np.zeros((2, 1), np.int64)}
        with pytest.raises(InputError, match=r"past_key_0: expected float32 \[2, "):
            runner.bind_cache({**ids, "logits_at": np.zeros(1, np.int64)}, {}, named)
        monkeypatch.setattr(gpu, "staging", lambda size: (_ for _ in ()).throw(BundleIncompatibleError("no memory")))
        kept = gpu.allocated_bytes
        with pytest.raises(BundleIncompatibleError, match="no memory"):
            CachedEngine(runner, engine, own, cache)
        assert gpu.allocated_bytes == kept
    with pytest.raises(BundleError, match="not open"):
        bound.step([1, 2], [0, 0])
    bound.close()
    cache.close()
