"""Engines of a range on a GPU: any size as it is, in memory for the largest, against the processor; what that costs."""

from pathlib import Path

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.tensorrt.build_bundle import build_plans
from nestforge.errors import BundleIncompatibleError
from nestforge.runtime.engines.onnxruntime_gpu.provider import Provider
from nestforge.runtime.engines.onnxruntime_gpu.runner import OnnxRuntimeGpuRunner
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.gpu_available import Results, milliseconds, needs_tensorrt, on
from support.tiny_compile import board
from support.tiny_models import save_tiny_encoder

SHORT, LONG = Bucket(4, 16, 1, 1), Bucket(4, 32, 1, 17)
# Up and down, some of them twice.
SHAPES = [(1, 1), (4, 32), (4, 32), (1, 16), (1, 17), (3, 7), (4, 1), (2, 29), (1, 1)]


@pytest.fixture(scope="module")
def ranges(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tiny encoder with two ranges, as ONNX Runtime has them."""
    folder = tmp_path_factory.mktemp("ranges")
    save_tiny_encoder(folder / "m")
    profile = board(budgets={"full": {}})
    return open_bundle(compile_bundle(folder / "m", profile, folder / "b", buckets=[SHORT, LONG]))


def assert_equal(found: ElasticModel, known: ElasticModel, atol: float = 1e-4) -> None:
    """At every shape, which answers by the range that holds it."""
    for seed, (batch, sequence) in enumerate(SHAPES):
        feeds = random_feeds(known.bundle.manifest.inputs, Bucket(batch, sequence), seed)
        answer = found(feeds)
        assert (answer.bucket, answer.padding) == (SHORT if sequence <= 16 else LONG, None)
        for name, array in known(feeds).outputs.items():
            np.testing.assert_allclose(answer[name], array, rtol=0, atol=atol)


def test_any_size_equals_the_processor(cuda: Provider, ranges: Bundle, results: Results) -> None:
    """Opening fails, with the node, if more than the arithmetic on sizes falls to the processor."""
    with on(cuda, ranges) as model, load(ranges.path) as known:
        assert_equal(model, known)
    with OnnxRuntimeGpuRunner(ranges, ranges.manifest.engines[0], cuda) as runner:
        for shape, captured in ((Bucket(2, 9), [False, True, True]), (Bucket(1, 9), [False])):
            for known in captured:
                runner.run(random_feeds(ranges.manifest.inputs, shape))
                assert runner.is_captured is known, runner.capture_refusal
    results.add("ranges on CUDA, up and down in size", "equal to the processor", "equal", "tiny BERT, two ranges")


@pytest.mark.needs_gpu
@pytest.mark.parametrize("stripped", [True, False])
def test_plans_of_ranges_answer_as_their_graphs(results: Results, tmp_path: Path, stripped: bool) -> None:
    """The build compares each plan with its graph at both ends and between, and fails otherwise."""
    needs_tensorrt()
    save_tiny_encoder(tmp_path / "m")
    profile = board(backend="tensorrt", budgets={"full": {}}, tensorrt={"strip_weights": stripped})
    bundle = compile_bundle(tmp_path / "m", profile, tmp_path / "b", buckets=[SHORT, LONG], emit_only=True)
    cases = [plan.entry.parity.cases for plan in build_plans(bundle)]
    with load(bundle) as plans, load(bundle, provider="cuda") as graphs:
        assert_equal(plans, graphs)
    kind = "stripped and refitted" if stripped else "whole"
    results.add(
        f"plans of ranges, {kind}", "equal to their graphs", "equal", f"tiny BERT, {sum(cases)} cases in builds"
    )


@pytest.mark.needs_gpu
def test_tensorrt_inside_onnx_runtime_builds_once_for_a_range(
    ranges: Bundle, results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        model = load(ranges.path, provider="tensorrt", preload=True)
    except BundleIncompatibleError as refusal:
        results.add("TensorRT inside ONNX Runtime, ranges", "not run", "equal", f"ONNX Runtime refuses it: {refusal}")
        pytest.skip(str(refusal))
    with model, load(ranges.path) as known:
        built = sorted(path.name for path in tmp_path.rglob("*.engine"))
        assert_equal(model, known)
        assert sorted(path.name for path in tmp_path.rglob("*.engine")) == built
    results.add("TensorRT inside ONNX Runtime, ranges", "equal, built once", "equal", f"{len(built)} engines")


def test_what_a_range_costs_at_the_shape_of_a_bucket(
    cuda: Provider, wide_model: Path, results: Results, tmp_path: Path
) -> None:
    static, free = Bucket(1, 128), Bucket(8, 512, 1, 1)
    profile = board(width_multiple=64, budgets={"full": {}}, memory_mb=8000)
    bundle = open_bundle(compile_bundle(wide_model, profile, tmp_path / "b", buckets=[static, free], include="budgets"))
    engines = {engine.bucket: engine for engine in bundle.manifest.engines}
    feeds = random_feeds(bundle.manifest.inputs, static)
    with (
        OnnxRuntimeGpuRunner(bundle, engines[static], cuda) as graph,
        OnnxRuntimeGpuRunner(bundle, engines[free], cuda) as calls,
    ):
        for mine, known in zip(calls.run(feeds), graph.run(feeds), strict=True):
            np.testing.assert_allclose(mine, known, rtol=0, atol=1e-4)
        found = milliseconds({"static": lambda: graph.run(feeds), "range": lambda: calls.run(feeds)})
    results.add(
        "an engine of a range against one of a static bucket at its shape",
        f"{found['range'] / found['static']:.2f}x ({found['range']:.3f} against {found['static']:.3f} ms)",
        "<= 1.2x",
        "4 x 1024, FFN 8192, 1x128 of 1..8x1..512, again and again: both start as a CUDA graph",
    )
