"""Latency of engines and chains on the CUDA provider. Answers are asserted; figures are printed, for they compare."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle
from nestforge.runtime.engines.onnxruntime_gpu.provider import Provider
from nestforge.runtime.engines.onnxruntime_gpu.runner import OnnxRuntimeGpuRunner
from nestforge.runtime.engines.runner import runner_for
from nestforge.runtime.exits.policy import ExitPolicy
from nestforge.runtime.inputs.arrays import random_feeds
from support.gpu_available import WITHOUT_TF32, Results, milliseconds, needs_torch_cuda, on


def whole(bundle: Bundle, bucket: Bucket) -> EngineEntry:
    """The engine of the largest submodel."""
    largest = max(bundle.manifest.submodels, key=lambda entry: entry.weight_bytes).id
    engines = [engine for engine in bundle.manifest.engines if engine.segment is None]
    return next(engine for engine in engines if (engine.submodel, engine.bucket) == (largest, bucket))


def test_a_cuda_graph_starts_an_engine_sooner(cuda: Provider, wide: Bundle, results: Results) -> None:
    engine = whole(wide, Bucket(1, 128))
    queued = replace(cuda, captures=False)
    feeds = random_feeds(wide.manifest.inputs, engine.bucket)
    with OnnxRuntimeGpuRunner(wide, engine, cuda) as graph, OnnxRuntimeGpuRunner(wide, engine, queued) as calls:
        assert graph.is_captured, graph.capture_refusal
        for captured, launched in zip(graph.run(feeds), calls.run(feeds), strict=True):
            np.testing.assert_allclose(captured, launched, rtol=0, atol=1e-5)
        found = milliseconds({"graph": lambda: graph.run(feeds), "calls": lambda: calls.run(feeds)})
        results.add(
            "a run as a CUDA graph against one call by call",
            f"{found['calls'] / found['graph']:.2f}x ({found['graph']:.3f} against {found['calls']:.3f} ms)",
            "> 1x",
            "4 x 1024, FFN 8192, 1x128",
        )


@pytest.mark.filterwarnings(WITHOUT_TF32)
@pytest.mark.needs_gpu
def test_an_engine_against_pytorch(cuda: Provider, wide: Bundle, wide_model: Path, results: Results) -> None:
    needs_torch_cuda()
    import torch
    import transformers

    torch.set_float32_matmul_precision("highest")
    engine = whole(wide, Bucket(1, 128))
    feeds = random_feeds(wide.manifest.inputs, engine.bucket)
    model = transformers.BertModel.from_pretrained(wide_model).eval().cuda()
    tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
    compiled = torch.compile(model, mode="reduce-overhead")

    def run(module: Callable[..., Any]) -> np.ndarray:
        with torch.inference_mode():
            given = {name: tensor.cuda() for name, tensor in tensors.items()}
            return module(**given).last_hidden_state.cpu().numpy()

    with runner_for(wide, engine, "shared", 1, cuda) as runner:
        np.testing.assert_allclose(runner.run(feeds)[0], run(model), rtol=1e-3, atol=1e-3)
        found = milliseconds(
            {"ours": lambda: runner.run(feeds), "eager": lambda: run(model), "compiled": lambda: run(compiled)}
        )
    for name, wanted in (("eager", ">= 2x"), ("compiled", ">= 1x")):
        results.add(
            f"an engine against PyTorch, {name}",
            f"{found[name] / found['ours']:.2f}x ({found['ours']:.3f} against {found[name]:.3f} ms)",
            wanted,
            "fp32 without TF32, 4 x 1024, FFN 8192, 1x128, copies to and from the GPU included",
        )


@pytest.mark.parametrize("batch", [1, 8])
def test_a_chain_that_nobody_leaves_against_its_whole_engine(
    cuda: Provider, leaver: Bundle, results: Results, batch: int
) -> None:
    feeds = random_feeds(leaver.manifest.inputs, Bucket(batch, 64))
    closed = ExitPolicy((-1.0, -1.0), "<=")
    with on(cuda, leaver) as model:
        np.testing.assert_allclose(
            model(feeds, exits=closed)["logits"], model(feeds, exits="off")["logits"], rtol=0, atol=1e-4
        )
        found = milliseconds({"chain": lambda: model(feeds, exits=closed), "whole": lambda: model(feeds, exits="off")})
    results.add(
        f"a chain without leavers against its whole engine, batch {batch}",
        f"{found['chain'] / found['whole']:.3f}x ({found['chain']:.3f} against {found['whole']:.3f} ms)",
        "<= 1.05x",
        "12 x 768, FFN 1024, three segments, 64 tokens, provider cuda",
    )


def test_rows_that_leave_answer_as_on_the_processor(cuda: Provider, leaver: Bundle, results: Results) -> None:
    """Rows leave at every exit, and those that stay are moved on the GPU."""
    from nestforge.runtime.load import load

    feeds = random_feeds(leaver.manifest.inputs, Bucket(8, 64))
    with on(cuda, leaver) as model, load(leaver.path) as known:
        entropies = known(feeds, exits=ExitPolicy((10.0, 10.0), "<=")).exits
        policy = ExitPolicy((float(np.median(entropies.entropy)),) * 2, "<=")
        mine, theirs = model(feeds, exits=policy), known(feeds, exits=policy)
        assert mine.exits.index.tolist() == theirs.exits.index.tolist()
        assert len(set(theirs.exits.index.tolist())) > 1
        np.testing.assert_allclose(mine["logits"], theirs["logits"], rtol=0, atol=1e-4)
        found = milliseconds(
            {"leaving": lambda: model(feeds, exits=policy), "whole": lambda: model(feeds, exits="off")}
        )
    results.add(
        "a chain that half of the rows leave against its whole engine, batch 8",
        f"{found['leaving'] / found['whole']:.3f}x",
        "< 1x",
        str(mine.exits),
    )
