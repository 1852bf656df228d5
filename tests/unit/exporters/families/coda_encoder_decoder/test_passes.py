from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.exporters.families.coda.encoder_decoder import (
    Answering,
    CachedDecoder,
    RecordedPass,
    SourceEncoder,
    lower,
)
from nestforge.exporters.trace import trace
from support.tiny_coda_t5 import encoder_config, pair_config, tiny_pair

CONFIG = pair_config(encoder_config(reduction=3))
IDS = torch.randint(0, 40, (1, 7), generator=torch.Generator().manual_seed(1))
BY_INDEX = {"coda.dispatch": "gather", "coda.combine": "scatter"}


def test_what_is_traced_returns_the_tokens_behind_its_outputs() -> None:
    module = Answering(tiny_pair(CONFIG))
    lowered, inputs = lower(module, BY_INDEX), (IDS, torch.ones_like(IDS), IDS)
    logits, chosen = lowered(*inputs)
    torch.testing.assert_close(logits, module(*inputs)[0])
    assert torch.equal(chosen, module.model.encoder.routed(IDS, None)[1][0].own)
    assert next(lowered.parameters()) is next(module.parameters())
    *keys, filled = SourceEncoder(lowered.model, returns_routes=True)(IDS)
    for found, expected in zip(keys, SourceEncoder(module.model)(IDS), strict=True):
        torch.testing.assert_close(found, expected)
    assert filled.tolist() == [[*chosen[0].tolist(), *[-1] * 5]]


def test_one_pass_over_both_texts_keeps_the_decoders_keys() -> None:
    model = tiny_pair(CONFIG)
    logits, key, value = RecordedPass(model)(IDS, IDS)
    torch.testing.assert_close(logits, model(IDS, torch.ones_like(IDS), IDS))
    assert key.shape == value.shape == (1, 3, 7, 8)
    assert isinstance(CachedDecoder(model), torch.nn.Module)


class Prompt:
    inputs = (TensorSpec("input_ids", "int64", (1, "sequence")),)
    outputs = (
        TensorSpec("key", "float32", (1, 3, 8, "sequence")),
        TensorSpec("value", "float32", (1, 3, "sequence", 8)),
    )


@pytest.mark.parametrize("reduction", [8, 16])
def test_a_prompt_is_traced_at_large_reductions(tmp_path: Path, reduction: int) -> None:
    """Of which short prompts have one token computed, and longer ones more."""
    model = tiny_pair(pair_config(encoder_config(reduction=reduction, reductions=(reduction, 1))))
    module = SourceEncoder(lower(Answering(model), BY_INDEX).model)
    ir.save(trace(module, Prompt(), Bucket(1, 24, None, 1), opset=20).model, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    for tokens in (1, 7, 17, 24):
        ids = torch.arange(tokens)[None]
        for found, expected in zip(session.run(None, {"input_ids": ids.numpy()}), module(ids), strict=True):
            np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
