"""Attention of every kind against sections 2.1 to 2.4, written out head by head."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.exporters.families.mhe.attention import Attention, folded_tensor, in_forms, lower
from nestforge.exporters.families.mhe.config import MheConfig, MheDecoderConfig
from nestforge.exporters.families.mhe.forms import held_forms
from nestforge.exporters.modules.layers import Answering
from nestforge.exporters.trace import trace
from support.tiny_mhe import decoder_config, encoder_config, pair_config, tiny_mhe

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
    found = attention(x, keys_and_values=attention.keys_and_values(y))
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


LIMIT = 1e-12
ROLES = ("encoder_attention", "decoder_attention", "cross_attention")


def in_one_form(model: Any, form: str) -> Any:
    return in_forms(model, {"attention": form})


def inputs(is_decoder: bool) -> Iterator[tuple[torch.Tensor, ...]]:
    """Whole rows, rows with tokens hidden on either side and in between, and a single token."""
    draw = torch.Generator().manual_seed(1)
    for tokens in (11, 1):
        ids = torch.randint(0, 40, (3, tokens), generator=draw)
        if is_decoder:
            yield (ids,)
            continue
        mask = torch.ones_like(ids)
        yield ids, mask
        if tokens > 1:
            hidden = mask.clone()
            hidden[0, 5:], hidden[1, :3], hidden[2, 4] = 0, 0, 0
            yield ids, hidden


@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("kind", ["mhe_add", "mhe_mul", "mhe_mul 1+e"])
@pytest.mark.parametrize("config_of", [encoder_config, decoder_config], ids=["encoder", "decoder"])
def test_every_form_that_holds(config_of: Any, kind: str, position: str, bias: bool) -> None:
    attention, *stored = kind.split()
    factors = {"factors": stored[0]} if stored else {}
    config = config_of(attention=attention, attention_bias=bias, position=position, **factors)
    model = tiny_mhe(config).double()
    for given in inputs(isinstance(config, MheDecoderConfig)):
        expected = model(*given)
        for form in held_forms(config):
            assert (in_one_form(model, form)(*given) - expected).abs().max() < LIMIT, form


@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize("kind", ["mhe_add", "mhe_mul"])
def test_every_form_in_every_role_of_two_sides(kind: str, bias: bool) -> None:
    """The second text is shorter than the first; in each role one form after the other, the others as they are written,
    and all at once."""
    config = pair_config(attention=kind, attention_bias=bias, num_decoder_layers=2)
    model, written = tiny_mhe(config).double(), dict.fromkeys(ROLES, "literal")
    for ids, mask in inputs(is_decoder=False):
        given = (ids, mask, (ids + 7)[:, :5] % 40)
        expected = model(*given)
        for form in held_forms(config):
            for forms in (*({**written, role: form} for role in ROLES), dict.fromkeys(ROLES, form)):
                assert (in_forms(model, forms)(*given) - expected).abs().max() < LIMIT, forms


def test_heads_of_another_size_and_a_scale_that_is_stated() -> None:
    for attention in ("mhe_add", "mhe_mul"):
        config = encoder_config(attention=attention, head_dim=5, softmax_scale=0.7)
        model = tiny_mhe(config).double()
        for given in inputs(is_decoder=False):
            for form in held_forms(config):
                assert (in_one_form(model, form)(*given) - model(*given)).abs().max() < LIMIT, form


def test_a_row_without_a_token_is_the_same_in_every_form() -> None:
    """Its probabilities are even and sum to 1: the finite mask decides what 6.8 leaves open. But for exponentials that
    are taken apart: there what a head adds to keys still counts, and the answer is a finite one."""
    config = encoder_config(attention="mhe_add")
    model, ids = tiny_mhe(config).double(), torch.randint(0, 40, (1, 6))
    assert in_one_form(model, "one_exponential")(ids, torch.zeros_like(ids)).isfinite().all()
    for form in set(held_forms(config)) - {"one_exponential"}:
        found = in_one_form(model, form)(ids, torch.zeros_like(ids))
        assert (found - model(ids, torch.zeros_like(ids))).abs().max() < LIMIT, form


@pytest.mark.parametrize(
    "form", ["literal", "expanded", "expanded_queries", "normal", "shared_scores", "one_exponential"]
)
def test_keys_of_mhe_add_have_no_effect(form: str) -> None:
    """Section 6.4: neither their head embeddings, at random here, nor a bias of their seed."""
    model = tiny_mhe(encoder_config(attention="mhe_add", attention_bias=True)).double()
    ids, mask = next(inputs(is_decoder=False))
    before = in_one_form(model, form)(ids, mask)
    for layer in model.layers:
        layer.attention.embedding["key"].normal_(std=3)
        layer.attention.key.bias.normal_(std=3)
    assert (in_one_form(model, form)(ids, mask) - before).abs().max() < LIMIT
    if form not in ("literal", "expanded"):  # which do not read them at all
        for layer in model.layers:
            layer.attention.embedding["key"].fill_(torch.nan)
        assert (in_one_form(model, form)(ids, mask) - before).abs().max() < LIMIT


def test_exponentials_taken_apart_lose_what_the_bound_on_weights_refuses() -> None:
    """In float32, of a head that weighs keys more than exp(1000) apart: what is left of those that a token reads is 0,
    and so is their sum. Less than exp(8) apart they are as exact as in any form."""
    config, ids = encoder_config(attention="mhe_add", num_hidden_layers=1, softmax_scale=3.0), torch.arange(24)[None]
    near, wide = (
        [in_one_form(tiny_mhe(config, far), form)(ids, torch.ones_like(ids)) for form in ("one_exponential", "normal")]
        for far in (0.05, 10.0)
    )
    assert (near[0] - near[1]).abs().max() < 1e-5
    assert wide[1].isfinite().all()
    assert wide[0].isnan().any()


def test_a_lowered_module_has_the_weights_of_the_users() -> None:
    module = Answering(tiny_mhe(encoder_config()))
    lowered = lower(module, {"attention": "normal"})
    own = dict(lowered.named_parameters())
    assert own["model.layers.1.attention.query.weight"] is module.model.layers[1].attention.query.weight
    name = "layers.1.attention.folded.query"
    assert torch.equal(own[f"model.{name}"], folded_tensor(module, name))
    assert "model.layers.1.attention.embedding.query" not in own
    assert module.model.layers[1].attention is not lowered.model.layers[1].attention
