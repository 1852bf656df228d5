"""A layer against the equations of the paper, written again with the one-hot matrix P and loops over heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nestforge.exporters.families.coda.attention import LowRank, Places, RelativeBias
from nestforge.exporters.families.coda.model import Layer
from nestforge.exporters.families.coda.routing import soft_top_k
from support.tiny_coda import SCHEDULE, coda_config

TOKENS = 6


def drawn(**settings: Any) -> tuple[Layer, torch.Tensor, Places]:
    """A layer in float64, its input, and places of which row 1 has two of padding."""
    torch.manual_seed(0)
    layer = Layer(coda_config(**settings), conditional=True).double()
    for name, parameter in layer.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + name.endswith("norm.weight")
    mask = torch.ones(2, TOKENS)
    mask[1, 4:] = 0
    relative = RelativeBias(4).double()
    relative.weight.data.normal_()
    x = torch.randn(2, TOKENS, 32).double()
    return layer.requires_grad_(False), x, Places.of(mask, x, relative.requires_grad_(False), None)


def norm_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def attended(
    layer: Layer, asking: torch.Tensor, read: torch.Tensor, bias: torch.Tensor, hidden_keys: torch.Tensor
) -> torch.Tensor:
    """Of one row, head by head: ``asking`` [q, d] and ``read`` [m, d], ``bias`` [A, q, m], ``hidden_keys`` [m]."""
    parts, size, config = layer.attention, 8, layer.config
    query, key, value = (part.weight for part in (parts.query, parts.key, parts.value))
    heads = []
    for head in range(4):
        shared = head // (4 // config.key_value_heads)
        own, theirs = slice(head * size, head * size + size), slice(shared * size, shared * size + size)
        scores = (asking @ query[own].T) @ (read @ key[theirs].T).T / size**0.5 + bias[head]
        scores[:, hidden_keys] = -1e300
        heads.append(scores.softmax(-1) @ (read @ value[theirs].T))
    return torch.cat(heads, -1) @ parts.output.weight.T


@pytest.mark.parametrize("keys_of", ["selected", "all"])
@pytest.mark.parametrize("ffn_residual", ["raw", "normed"])
@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_the_equations(keys_of: str, ffn_residual: str, key_value_heads: int) -> None:
    layer, x, places = drawn(keys_of=keys_of, ffn_residual=ffn_residual, num_key_value_heads=key_value_heads)
    found, selection = layer(x, places, 3)
    assert selection is not None
    assert layer.router is not None
    for row in range(2):
        normed = norm_of(x[row], layer.attention_norm.weight)
        scores = torch.where(places.is_token[row], normed @ layer.router.weight, -1e9)
        gates = soft_top_k(scores, 3, SCHEDULE, layer.router.temperatures) * places.is_token[row]
        matrix = torch.nn.functional.one_hot(scores.topk(3).indices, TOKENS).double()  # P [k, n]
        routed = matrix @ normed  # (3)
        bias, hidden = matrix @ places.bias, ~places.is_token[row]
        read = normed
        if keys_of == "selected":
            read, bias, hidden = routed, bias @ matrix.T, matrix @ hidden.double() > 0
        attention = attended(layer, routed, read, bias, hidden)  # (4)
        residual = matrix @ x[row] if ffn_residual == "raw" else routed
        ffn = (norm_of(residual + attention, layer.ffn_norm.weight) @ layer.ffn.up.weight.T).relu()
        conditional = matrix.T @ (attention + ffn @ layer.ffn.down.weight.T)  # (6)
        adapter = (normed @ layer.adapter.down.weight.T + layer.adapter.down.bias).relu()
        adapter = adapter @ layer.adapter.up.weight.T + layer.adapter.up.bias  # (1)
        chosen = (gates * matrix.sum(0))[:, None]
        torch.testing.assert_close(found[row], x[row] + adapter + chosen * conditional, rtol=0, atol=1e-12)  # (7)


@pytest.mark.parametrize("keys_of", ["selected", "all"])
def test_where_norms_come_last_the_dense_layer_less_the_rows_is_added(keys_of: str) -> None:
    layer, x, places = drawn(keys_of=keys_of, norm_place="after")
    found, selection = layer(x, places, 3)
    assert selection is not None
    assert layer.router is not None
    for row in range(2):
        scores = torch.where(places.is_token[row], x[row] @ layer.router.weight, -1e9)
        gates = soft_top_k(scores, 3, SCHEDULE, layer.router.temperatures) * places.is_token[row]
        matrix = torch.nn.functional.one_hot(scores.topk(3).indices, TOKENS).double()  # P [k, n]
        rows, bias, hidden = matrix @ x[row], matrix @ places.bias, ~places.is_token[row]
        read = x[row]
        if keys_of == "selected":
            read, bias, hidden = rows, bias @ matrix.T, matrix @ hidden.double() > 0
        middle = norm_of(rows + attended(layer, rows, read, bias, hidden), layer.attention_norm.weight)
        ffn = (middle @ layer.ffn.up.weight.T).relu() @ layer.ffn.down.weight.T
        dense = norm_of(middle + ffn, layer.ffn_norm.weight)
        adapter = layer.adapter(x[row])
        added = (gates * matrix.sum(0))[:, None] * (matrix.T @ (dense - rows))
        torch.testing.assert_close(found[row], x[row] + adapter + added, rtol=0, atol=1e-12)


@pytest.mark.parametrize("keys_of", ["selected", "all"])
def test_low_rank_terms_are_matrices_added_to_queries_and_values(keys_of: str) -> None:
    """LoRA (arXiv 2106.09685, equation 3) merged into frozen matrices; tokens that are left out pass as they are."""
    layer, x, places = drawn(keys_of=keys_of, adapter="lora", adapter_scale=0.5, num_key_value_heads=2)
    found, selection = layer(x, places, 3)
    assert selection is not None
    terms = layer.adapter
    assert isinstance(terms, LowRank)
    merged, _, _ = drawn(keys_of=keys_of, num_key_value_heads=2)
    frozen = {name: tensor for name, tensor in layer.state_dict().items() if "adapter" not in name}
    merged.load_state_dict({**merged.state_dict(), **frozen})
    merged.adapter.up.weight.zero_(), merged.adapter.up.bias.zero_()
    for part in ("query", "value"):
        term = getattr(terms, part)
        getattr(merged.attention, part).weight += 0.5 * term.up.weight @ term.down.weight
    expected, chosen = merged(x, places, 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    left_out = torch.ones(2, TOKENS, dtype=torch.bool).scatter(1, selection.chosen, False)
    assert torch.equal(found[left_out], x[left_out])
    assert torch.equal(chosen.chosen, selection.chosen)


def test_a_sequential_adapter_reads_what_the_layer_made_of_every_token() -> None:
    layer, x, places = drawn(adapter="sequential")
    with_adapter, selection = layer(x, places, 3)
    up = layer.adapter.up.weight.clone(), layer.adapter.up.bias.clone()
    layer.adapter.up.weight.zero_(), layer.adapter.up.bias.zero_()
    bare, _ = layer(x, places, 3)
    inner = (bare @ layer.adapter.down.weight.T + layer.adapter.down.bias).relu()
    torch.testing.assert_close(with_adapter, bare + inner @ up[0].T + up[1], rtol=0, atol=1e-12)
    left_out = torch.ones(2, TOKENS, dtype=torch.bool).scatter(1, selection.chosen, False)
    assert torch.equal(bare[left_out], x[left_out])
    assert float((with_adapter - bare)[left_out].abs().max()) > 1e-3, "also of tokens that are left out"


@pytest.mark.parametrize("keys_of", ["selected", "all"])
def test_all_tokens_at_a_gate_of_one_without_an_adapter_are_the_dense_layer(keys_of: str) -> None:
    """With the raw residual; the normalised one is another layer."""
    for ffn_residual, equal in (("raw", True), ("normed", False)):
        layer, x, places = drawn(keys_of=keys_of, ffn_residual=ffn_residual, router="first_k")
        layer.adapter.up.weight.zero_(), layer.adapter.up.bias.zero_()
        dense, selection = layer(x, places, None)
        assert selection is None
        normed = layer.attention_norm(x)
        attention = x + layer.attention(normed, normed, places.added(), None, None)
        torch.testing.assert_close(dense, attention + layer.ffn(layer.ffn_norm(attention)), rtol=0, atol=1e-12)
        conditional, _ = layer(x, places, TOKENS)
        gap = float((conditional - dense)[places.is_token].abs().max())
        assert gap < 1e-12 if equal else gap > 1e-3


def test_activations_gates_and_scales_of_the_adapter_and_the_ffn() -> None:
    layer, x, _ = drawn(activation="gelu_tanh", gated_ffn=True, adapter_activation="gelu", adapter_scale=0.5)
    ffn, gelu = layer.ffn, torch.nn.functional.gelu
    assert ffn.gate is not None
    inner = gelu(x @ ffn.gate.weight.T, approximate="tanh") * (x @ ffn.up.weight.T)
    torch.testing.assert_close(ffn(x), inner @ ffn.down.weight.T)
    adapter = layer.adapter
    torch.testing.assert_close(adapter(x), 0.5 * adapter.up(gelu(adapter.down(x))))
