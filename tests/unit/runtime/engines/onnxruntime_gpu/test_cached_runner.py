"""Bound runs and KV-cache engines on the processor's memory and kernels in the place of a GPU's; none ran on a GPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleError, BundleIncompatibleError, InputError
from nestforge.runtime.engines.onnxruntime_gpu.cached_runner import OnnxRuntimeGpuCacheRunner
from nestforge.runtime.engines.onnxruntime_gpu.session import BoundRun
from nestforge.runtime.generation.cache_memory import DeviceCache
from nestforge.runtime.generation.cached_engine import CachedEngine
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.fake_gpu import Gpu, HostDevice, played_sessions, provider_on
from support.fake_gpu import Gpu as PlayedGpu
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
    engine = next(one for one in entry.engines if (one.submodel, one.capacity) == (NARROW, 40))
    own = entry.of(engine)
    runner = OnnxRuntimeGpuCacheRunner(bundle, engine, provider_on(gpu), 1)
    with runner:
        cache = DeviceCache.empty(own.layers, 2, 40, runner.device)
        bound = CachedEngine(runner, engine, own, cache)
        step = bound._step.call
        for turn in range(4):
            bound.step([1, 2], [0, 0])
            assert step.is_captured is (turn > 0)
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


class HostGpu(HostDevice):
    kind = "cuda"


class Session:
    """``calls`` are what it was asked, waits of the device included."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.failure = failure

    def run(self, binding: object, options: Any) -> None:
        self.queue(binding, options)

    def queue(self, _binding: object, options: Any) -> None:
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        self.calls.append("run")
        if self.failure is not None:
            raise self.failure


def bound_to(session: Session, device: HostDevice, captures: bool = False) -> tuple[BoundRun, list[BoundRun]]:
    """The run, and those that were closed."""
    closed: list[BoundRun] = []
    anything: Any = session
    return BoundRun("engine e", device, anything, object(), captures, closed.append), closed


@pytest.mark.parametrize("reason", ["CUBLAS failure 14: CUBLAS_STATUS_INTERNAL_ERROR", "Failed to run node 3"])
def test_failures_on_a_gpu_are_no_fault_of_the_input(reason: str) -> None:
    run, _ = bound_to(Session(RuntimeError(f"{reason}\nmore")), HostGpu())
    with pytest.raises(BundleError, match=f"^engine e: {reason}$"):
        run()
    run, _ = bound_to(Session(RuntimeError(reason)), HostDevice())  # the processor looks at values
    with pytest.raises(InputError, match=f"^engine e: {reason}$"):
        run()


def test_the_third_run_starts_as_a_graph() -> None:
    session, gpu = Session(), PlayedGpu()
    run, _ = bound_to(session, gpu, captures=True)
    captured = []
    for _ in range(4):
        run()
        captured.append(run.is_captured)
    assert captured == [False, True, True, True]
    assert (len(gpu.graphs), gpu.starts, run.refusal) == (1, 2, None)
    run.close()
    assert not run.is_captured
    gpu.thread.close()


def test_a_run_that_cannot_be_captured_stays_as_it_is() -> None:
    session, gpu = Session(), PlayedGpu()
    gpu.refuses = "CUDA: capturing a run: operation not permitted when stream is capturing"
    run, _ = bound_to(session, gpu, captures=True)
    for _ in range(4):
        run()
    assert (run.is_captured, run.refusal) == (False, gpu.refuses)
    assert session.calls == ["run"] * 4
    session.failure = RuntimeError("CUDA failure 700: an illegal memory access was encountered")
    with pytest.raises(BundleError, match="CUDA failure 700"):
        run()
    gpu.thread.close()


@pytest.mark.parametrize("captures", [True, False])
def test_a_closed_run_lets_its_callers_memory_go_once_what_is_queued_is_done(captures: bool) -> None:
    session = Session()

    class Waiting(HostGpu):
        def wait(self) -> None:
            session.calls.append("wait")

    run, closed = bound_to(session, Waiting(), captures)
    run()
    run.close()
    run.close()
    assert closed == [run]
    assert session.calls == ["run", "wait"]
    with pytest.raises(BundleError, match="not open"):
        run()


def test_a_run_whose_session_closes_waits_for_nothing() -> None:
    session = Session()
    run, closed = bound_to(session, HostGpu(), captures=True)
    run.drop()
    run.close()
    assert (session.calls, closed) == ([], [])
    with pytest.raises(BundleError, match="not open"):
        run()
