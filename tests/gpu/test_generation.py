"""Text by ONNX Runtime on the CUDA provider, from the graphs of a bundle for TensorRT, whose caches stay on the GPU."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.runtime.engines.onnxruntime_gpu.cached_runner import OnnxRuntimeGpuCacheRunner
from nestforge.runtime.engines.onnxruntime_gpu.provider import Provider
from nestforge.runtime.load import load
from support.gated_decoders import save_decoder
from support.generating import requests_of, require_same_texts
from support.gpu_available import Results, needs_torch_cuda, on
from support.tiny_compile import board
from support.tiny_models import save_t5

MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: save_decoder(folder, head_dim=8, max_position_embeddings=640),
    "gemma3": lambda folder: save_decoder(folder, "gemma3_text", head_dim=8, max_position_embeddings=640),
    "t5": lambda folder: save_t5(folder, d_model=32, d_ff=64),
}


def on_device(model: Path, folder: Path, **options: Any) -> Path:
    profile = board(backend="tensorrt", budgets={"full": {}}, memory_mb=8000, capacities=[64, 512])
    return compile_bundle(model, profile, folder, emit_only=True, generate=True, **options)


@pytest.mark.parametrize("name", MODELS)
def test_text_equals_the_processors(cuda: Provider, results: Results, tmp_path: Path, name: str) -> None:
    """Rows that leave, moves between capacities, drafts and another submodel, sampled."""
    folder = MODELS[name](tmp_path / "m")
    bundle = on_device(folder, tmp_path / "d", levels={"ffn": (0.5, 1.0)})
    known = compile_bundle(
        folder, board(budgets={"full": {}}), tmp_path / "b", levels={"ffn": (0.5, 1.0)}, generate=True, measure=False
    )
    prompts = [[5, 7, 9], list(range(1, 41)), [3] * 2, [number % 47 for number in range(100, 400)]]
    with on(cuda, open_bundle(bundle)) as model, load(known) as processor:
        smallest = model.bundle.manifest.largest_first[-1].id
        require_same_texts(model, processor, requests_of(prompts, smallest, (100, 40, 60), 4))
        runners = model.generate._engines._open.values()
        assert all(isinstance(one, OnnxRuntimeGpuCacheRunner) for one in runners)
    results.add(f"text of {name} by ONNX Runtime on CUDA", "the processor's tokens", "equal", "tiny, sampled")


@pytest.mark.needs_gpu
def test_tokens_per_second_against_transformers(cuda: Provider, results: Results, tmp_path: Path) -> None:
    needs_torch_cuda()
    import torch
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=8000, intermediate_size=2048, head_dim=64, max_position_embeddings=1024, **shape
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "m")
    bundle = open_bundle(on_device(tmp_path / "m", tmp_path / "d", levels={"ffn": (1.0,)}))
    prompt, count = list(range(1, 33)), 100
    model = model.eval().cuda()
    ids = torch.tensor([prompt]).cuda()
    given = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    with on(cuda, bundle) as ours, torch.inference_mode():
        theirs = model.generate(ids, **given)[0, len(prompt) :].tolist()
        times: dict[str, list[float]] = {"ours": [], "eager": []}
        for turn in range(6):
            row = ours.generate(prompt, max_tokens=count, stop=[]).rows[0]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            model.generate(ids, **given)
            end.record()
            torch.cuda.synchronize()
            if turn:
                times["ours"].append(median(row.token_ms))
                times["eager"].append(begin.elapsed_time(end) / count)
        assert row.tokens == theirs
    mine, eager = (median(times[name]) for name in ("ours", "eager"))
    results.add(
        "a token against transformers' generate",
        f"{eager / mine:.2f}x ({mine:.3f} against {eager:.3f} ms)",
        ">= 2x",
        "fp32 without TF32, 8 x 768, FFN 2048, 8,000 tokens, one row",
    )
