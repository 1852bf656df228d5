"""Text of encoder-decoders from plans of TensorRT: what the encoder's plan makes of prompts stays on the GPU. In a
rehearsal stand-ins play TensorRT and the GPU, as in tests/unit/runtime/generation/test_source_plans.py."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from nestforge.compiler.compile import compile_bundle
from nestforge.runtime.generation.row import GeneratedRow
from nestforge.runtime.load import load
from nestforge.tools.cli import main
from support.fake_tensorrt import host_with_gpu
from support.generating import RELEASE, few_prompt_tokens, requests_of, require_same_texts
from support.gpu_available import Results, needs_tensorrt
from support.tiny_compile import board
from support.tiny_models import V1_1, save_t5


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
