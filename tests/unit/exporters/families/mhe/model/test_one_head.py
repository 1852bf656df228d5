from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.exporters.families.mhe.attention_forms import in_forms, lower
from nestforge.exporters.modules.layers import Answering
from nestforge.exporters.trace import trace
from support.tiny_mhe import encoder_config, pair_config, tiny_mhe

SHAPE = ("batch", "sequence")


class Encoder:
    inputs = (TensorSpec("input_ids", "int64", SHAPE), TensorSpec("attention_mask", "int64", SHAPE))
    outputs = (TensorSpec("y", "float32", (*SHAPE, 32)),)


@pytest.mark.parametrize("kind", ["mhe_add", "mhe_mul"])
def test_where_an_encoder_is_read_too(kind: str) -> None:
    """In float64, with a shorter second text and hidden tokens in the first."""
    model = tiny_mhe(pair_config(attention=kind, attention_bias=True)).double()
    ids, mask = torch.randint(0, 40, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, 6:], mask[1, :2] = 0, 0
    forms = {"encoder_attention": "one_head", "decoder_attention": "literal", "cross_attention": "one_head"}
    given = (ids, mask, ids[:, :4])
    assert (in_forms(model, forms)(*given) - model(*given)).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["mhe_add", "mhe_mul"])
def test_the_operator_hides_what_the_mask_hides(tmp_path: Path, kind: str) -> None:
    """Traced with both dimensions free, keys hidden on either side and all but one; a row without any reads the mean of
    its values, as in every form."""
    module = Answering(tiny_mhe(encoder_config(attention=kind)))
    traced = trace(lower(module, {"attention": "one_head"}), Encoder(), Bucket(4, 16, 1, 1), opset=20)
    path = tmp_path / "m.onnx"
    ir.save(traced.model, path)
    graph = onnx.load(path).graph
    assert sum(node.op_type == "MultiHeadAttention" for node in graph.node) == 2
    assert not any(node.op_type == "Softmax" for node in graph.node)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for tokens in (1, 12):
        ids, mask = torch.randint(0, 40, (4, tokens)), torch.ones(4, tokens, dtype=torch.int64)
        mask[0, 7:], mask[1, :3], mask[2, 1:], mask[3] = 0, 0, 0, 0
        (found,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        np.testing.assert_allclose(found, module(ids, mask)[0].numpy(), atol=1e-5)
