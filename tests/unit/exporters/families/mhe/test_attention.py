"""Attention of every kind against sections 2.1 to 2.4, written out head by head."""

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
from nestforge.exporters.families.mhe.attention import Attention
from nestforge.exporters.families.mhe.attention_forms import in_forms, lower
from nestforge.exporters.families.mhe.config import MheConfig
from nestforge.exporters.modules.layers import Answering
from nestforge.exporters.trace import trace
from support.tiny_mhe import encoder_config, pair_config, tiny_mhe

KINDS = ("mha", "sha", "mqa", "skv", "el_att", "mhe_add", "mhe_mul")


def drawn(config: MheConfig) -> Attention:
    torch.manual_seed(3)
    attention = Attention(config).double().requires_grad_(False)
    for parameter in attention.parameters():
        parameter.data = torch.randn_like(parameter) * 0.4
    return attention


def head(attention: Attention, x: torch.Tensor, i: int, read: torch.Tensor | None = None) -> torch.Tensor:
    """``H_i = softmax(Q_i K_i^T / sqrt(d)) V_i`` [L, d] of ``x`` [L, H], keys and values of ``read`` [N, H], of itself
    unless given."""
    y = x if read is None else read
    config, d = attention.config, attention.config.head_size
    own = slice(i * d, (i + 1) * d)

    def projected(part: str, rows: slice | None) -> torch.Tensor:
        layer = getattr(attention, part)
        rows = slice(None) if rows is None else rows
        found = (x if part == "query" else y) @ layer.weight[rows].T
        return found if layer.bias is None else found + layer.bias[rows]

    match config.attention:
        case "mha":
            q, k, v = (projected(part, own) for part in ("query", "key", "value"))
        case "sha":
            q, k, v = (projected(part, None) for part in ("query", "key", "value"))
        case "mqa":
            q, k, v = projected("query", own), projected("key", None), projected("value", None)
        case "skv":
            q, k = projected("query", own), projected("key_value", own)
            v = k
        case "el_att":
            q, k, v = projected("query", own), y[:, own], y[:, own]
        case "mhe_add":
            q, k, v = (projected(p, None) + attention.embedding[p][i] for p in ("query", "key", "value"))
        case "mhe_mul":
            q, k, v = (projected(p, None) * (attention.embedding[p][i] + 1) for p in ("query", "key", "value"))
    return (q @ k.T / d**0.5).softmax(-1) @ v


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_kind(kind: str, bias: bool) -> None:
    attention = drawn(encoder_config(attention=kind, attention_bias=bias))
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    for row, found in zip(x, attention(x), strict=True):
        heads = torch.cat([head(attention, row, i) for i in range(4)], -1)
        expected = heads @ attention.output.weight.T
        if bias:
            expected = expected + attention.output.bias
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_over_another_text(kind: str) -> None:
    """Cross-attention: queries of one text, keys and values of the other."""
    attention = drawn(encoder_config(attention=kind))
    x, y = torch.randn(1, 4, 32, dtype=torch.float64), torch.randn(1, 7, 32, dtype=torch.float64)
    heads = torch.cat([head(attention, x[0], i, read=y[0]) for i in range(4)], -1)
    found = attention(x, kept=attention.kept(y))
    torch.testing.assert_close(found[0], heads @ attention.output.weight.T, rtol=0, atol=1e-13)


def test_factors_are_stored_with_or_without_their_one() -> None:
    without, with_it = (drawn(encoder_config(factors=factors)) for factors in ("e", "1+e"))
    with_it.load_state_dict(
        {
            name.replace("embedding", "factor"): value + 1 if "embedding" in name else value
            for name, value in without.state_dict().items()
        }
    )
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    torch.testing.assert_close(with_it(x), without(x), rtol=0, atol=1e-14)


def test_one_head_without_embeddings_is_sha() -> None:
    """Section 8: n = 1 and zero embeddings."""
    one = {"num_attention_heads": 1, "head_dim": 8}
    mhe, sha = (drawn(encoder_config(attention=kind, **one)) for kind in ("mhe_add", "sha"))
    for table in mhe.embedding.values():
        table.zero_()
    sha.load_state_dict({name: value for name, value in mhe.state_dict().items() if "embedding" not in name})
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    assert torch.equal(mhe(x), sha(x))


def test_a_scale_that_is_stated() -> None:
    attention, other = drawn(encoder_config()), drawn(encoder_config(softmax_scale=2 * 8**-0.5))
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    attention.query.weight.mul_(2)
    torch.testing.assert_close(attention(x), other(x), rtol=0, atol=1e-13)


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
