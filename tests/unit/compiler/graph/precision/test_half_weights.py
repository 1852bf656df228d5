"""16 bits on disk, float32 in the products: of a checkpoint in bfloat16 nothing is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from nestforge.compiler.compile import compile_bundle
from nestforge.runtime.load import load
from safetensors.torch import load_file
from support.gated_decoders import make_decoder
from support.tiny_compile import board


def test_a_checkpoint_in_bfloat16_is_stored_as_it_is_and_answers_as_in_float32(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128, "head_dim": 8, "tie_word_embeddings": True}
    make_decoder("llama", num_hidden_layers=1, **sizes).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    profile = board(precision=["fp32", "bf16-weights"], budgets={"full": {}}, buckets=["1x8"])
    bundle = compile_bundle(tmp_path / "model", profile, tmp_path / "b", generate=True, levels={"ffn": (1.0,)})
    own, stored = load_file(tmp_path / "model" / "model.safetensors"), load_file(bundle / "weights.safetensors")
    narrow = {name.removesuffix(".bf16"): tensor for name, tensor in stored.items() if name.endswith(".bf16")}
    table = next(name for name in own if name.endswith("embed_tokens.weight"))
    assert torch.equal(narrow[next(name for name in narrow if table.endswith(name))], own[table])
    matrices = sum(tensor.numel() for tensor in own.values() if tensor.dim() == 2)
    assert sum(tensor.numel() for tensor in narrow.values()) == matrices, "the table, tied, once"
    with load(bundle, threads=1) as model:
        half, wide = model.bundle.manifest.submodels
        assert (wide.precision, half.precision) == ("fp32", "bf16-weights")
        assert half.weight_bytes < 0.52 * wide.weight_bytes
        ids = np.array([[3, 1, 4, 1, 5]])
        answers = [model({"input_ids": ids}, submodel=entry.id)["logits"] for entry in (wide, half)]
        assert np.array_equal(*answers)
        texts = [model.generate([3, 1, 4], submodel=entry.id, max_tokens=5).rows[0].tokens for entry in (wide, half)]
        assert texts[0] == texts[1]
    receipts = [engine.parity for engine in model.bundle.manifest.every_engine if engine.submodel == half.id]
    assert all(output.max_rms < 1e-5 for receipt in receipts if receipt for output in receipt.outputs)
    assert len(receipts) == 2
