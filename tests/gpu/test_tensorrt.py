"""Plans of TensorRT itself: built, refitted from the store, run, chained and writing text. Skipped without it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import BundleIncompatibleError
from nestforge.runtime.engines.onnxruntime_gpu.provider import Provider
from nestforge.runtime.exits.policy import ExitPolicy
from nestforge.runtime.generation.row import GeneratedRow
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.runtime.load import load
from nestforge.tools.cli import main
from support.cost_eff_models import save_tiny
from support.fake_tensorrt import host_with_gpu
from support.generating import RELEASE, few_prompt_tokens, requests_of, require_same_texts
from support.gpu_available import Results, milliseconds, needs_tensorrt
from support.tiny_compile import board
from support.tiny_matlm import save_tiny_matlm
from support.tiny_models import V1_1, save_t5, save_tiny_encoder

pytestmark = pytest.mark.needs_gpu


def build(bundle: Path) -> None:
    done = CliRunner().invoke(main, ["build", str(bundle)], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("stripped", "precision"), [(True, "fp32"), (False, "fp32"), (True, "fp16")])
def test_plans_answer_as_their_graphs(
    cuda: Provider, results: Results, tmp_path: Path, stripped: bool, precision: str
) -> None:
    """The build itself compares each plan, refitted where it is stripped, with its graph, and fails otherwise."""
    needs_tensorrt()
    folder = save_tiny_encoder(tmp_path / "m")
    options = {"strip_weights": stripped}
    profile = board(backend="tensorrt", budgets={"full": {}}, tensorrt=options, precision=precision)
    bundle = compile_bundle(folder, profile, tmp_path / "b", buckets=[Bucket(2, 16)], emit_only=True)
    build(bundle)
    opened = open_bundle(bundle)
    feeds = random_feeds(opened.manifest.inputs, Bucket(2, 16))
    with load(bundle) as plans, load(bundle, provider="cuda") as graphs:
        for entry in opened.manifest.submodels:
            mine, known = plans(feeds, submodel=entry.id), graphs(feeds, submodel=entry.id)
            for name, array in known.outputs.items():
                limit = 1e-4 if precision == "fp32" else 5e-2
                np.testing.assert_allclose(mine[name], array, rtol=0, atol=limit)
    kind = "stripped and refitted" if stripped else "whole"
    results.add(f"plans of TensorRT, {kind}, {precision}", "equal to their graphs", "equal", "tiny BERT, all submodels")


def test_a_chain_of_plans_stays_on_the_gpu(results: Results, compile_leaver: Callable[..., Bundle]) -> None:
    needs_tensorrt()
    bundle = compile_leaver(backend="tensorrt")
    build(bundle.path)
    feeds = random_feeds(bundle.manifest.inputs, Bucket(8, 64))
    closed, opened = ExitPolicy((-1.0, -1.0), "<="), ExitPolicy((0.5, 0.5), "<=")
    with load(bundle.path) as plans, load(bundle.path, provider="cuda") as graphs:
        for policy in (closed, opened):
            mine, known = plans(feeds, exits=policy), graphs(feeds, exits=policy)
            np.testing.assert_allclose(mine["logits"], known["logits"], rtol=0, atol=1e-3)
        found = milliseconds({"chain": lambda: plans(feeds, exits=closed), "whole": lambda: plans(feeds, exits="off")})
    results.add(
        "a chain of plans without leavers against its whole plan, batch 8",
        f"{found['chain'] / found['whole']:.3f}x ({found['chain']:.3f} against {found['whole']:.3f} ms)",
        "<= 1.05x",
        "12 x 768, FFN 1024, three segments, 64 tokens, TensorRT",
    )


def test_text_is_written_by_plans_that_keep_a_cache_on_the_gpu(results: Results, tmp_path: Path) -> None:
    """The build itself compares logits and caches with the graphs, over texts in pieces, to the last place. Rows,
    drafts and moves between capacities then write what the processor's engines do."""
    needs_tensorrt((10, 15))
    folder = save_tiny_matlm(tmp_path / "m", nested_heads=True, max_position_embeddings=1024)
    options: dict[str, Any] = {"levels": {"ffn": (0.5, 1.0), "heads": (1.0,)}, "generate": True}
    device = board(backend="tensorrt", budgets={"full": {}}, capacities=[128, 1024])
    plans = compile_bundle(folder, device, tmp_path / "plans", emit_only=True, **options)
    known = compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "known", measure=False, **options)
    build(plans)
    prompts = [[5, 7, 9], list(range(10, 60)), [3] * 2]
    with load(plans) as mine, load(known) as processor:
        smallest = mine.bundle.manifest.largest_first[-1].id
        requests: list[dict[str, Any]] = [
            {"prompt": prompts[0], "max_tokens": 150},
            {"prompt": prompts, "max_tokens": 40},
            {"prompt": prompts[1], "max_tokens": 60, "draft": smallest},
        ]
        for asked in requests:
            found, expected = (model.generate(**asked).rows for model in (mine, processor))
            assert [row.tokens for row in found] == [row.tokens for row in expected]
        took = sorted(mine.generate(prompts[0], max_tokens=100).rows[0].token_ms)
    results.add("text from KV-cache plans", "the processor's tokens", "equal", f"tiny MatLM, {took[50]:.3f} ms a token")


@pytest.mark.parametrize("kind", ["engine", "chain"])
def test_tensorrt_inside_onnx_runtime_answers(results: Results, tmp_path: Path, kind: str) -> None:
    """Its library is linked to TensorRT 10: where that is missing ONNX Runtime says so, and so do the results. A chain
    runs its sessions on many places, of which none may be answered at another."""
    folder = (save_tiny_encoder if kind == "engine" else save_tiny)(tmp_path / "m")
    bundle = compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "b", buckets=[Bucket(2, 16)])
    cases = [random_feeds(open_bundle(bundle).manifest.inputs, Bucket(2, 16), seed) for seed in range(3)]
    asked = {} if kind == "engine" else {"exits": ExitPolicy((-1.0,) * (_exits(bundle) - 1), "<=")}
    try:
        model = load(bundle, provider="tensorrt", preload=True)
    except BundleIncompatibleError as refusal:
        results.add(f"TensorRT inside ONNX Runtime, {kind}", "not run", "equal", f"ONNX Runtime refuses it: {refusal}")
        pytest.skip(str(refusal))
    with model, load(bundle) as known:
        for feeds in cases:
            for name, array in known(feeds, **asked).outputs.items():
                np.testing.assert_allclose(model(feeds, **asked)[name], array, rtol=0, atol=1e-4)
    results.add(f"TensorRT inside ONNX Runtime, {kind}", "equal to the processor", "equal", "tiny models")


def _exits(bundle: Path) -> int:
    exits = open_bundle(bundle).manifest.exits
    return len(exits.segments)


@contextmanager
def played_gpu(folder: Path) -> Iterator[None]:
    with host_with_gpu(folder / "cache", version=RELEASE), few_prompt_tokens():
        yield


@pytest.mark.parametrize("form", ["t5", "t5-v1.1"])
def test_text_behind_prompts_is_written_by_plans(rehearsed: bool, results: Results, tmp_path: Path, form: str) -> None:
    """The build itself compares what the encoder's plan makes of prompts up to the longest, and the decoder's logits
    and caches behind them, with the graphs. Rows of different prompts that leave, moves between capacities, drafts and
    another submodel then write what the processor's engines do; sampled, since the first form's likeliest token may be
    the one that it was given."""
    if not rehearsed:
        needs_tensorrt((10, 15))
    folder = save_t5(tmp_path / "m", d_model=32, d_ff=64, **(V1_1 if form == "t5-v1.1" else {}))
    options: dict[str, Any] = {"levels": {"ffn": (0.5, 1.0)}, "generate": True}
    device = board(backend="tensorrt", budgets={"full": {}}, capacities=[64, 512])
    plans = compile_bundle(folder, device, tmp_path / "plans", emit_only=True, **options)
    known = compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "known", measure=False, **options)
    with played_gpu(tmp_path) if rehearsed else nullcontext():
        done = CliRunner().invoke(main, ["build", str(plans)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        row = _compared(plans, known)
    results.add(
        f"text from plans of an encoder-decoder, {form}",
        "the processor's tokens",
        "equal",
        f"tiny, {row.prompt_ms:.3f} ms for a prompt of 300 tokens, {sorted(row.token_ms)[20]:.3f} ms a token",
    )


def _compared(plans: Path, known: Path) -> GeneratedRow:
    """A row that ``plans`` write, once they write what the engines of ``known`` do."""
    prompts = [[5, 7, 9], list(range(10, 70)), [3] * 2, list(range(100, 400))]
    with load(plans) as mine, load(known) as processor:
        smallest = mine.bundle.manifest.largest_first[-1].id
        require_same_texts(mine, processor, requests_of(prompts, smallest, (100, 40, 60), 4))
        return mine.generate(prompts[3], max_tokens=40, stop=[]).rows[0]
