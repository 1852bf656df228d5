from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.exporters.matformer.language_model import MatformerLM
from nestforge.exporters.matformer.nested_ffn import NestedFFN
from nestforge.exporters.matformer.shapes import elastic_spec, language_model_shapes
from tiny_matlm import matlm_config, tiny_matlm
from torch.nn import functional

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False}, {"intermediate_size": (8, 64, 24)}, {"nested_heads": True}]
)
def test_the_modules_parameters_are_those_that_its_config_says(changes: dict[str, Any]) -> None:
    config = matlm_config(**changes)
    with torch.device("meta"):
        model = MatformerLM(config)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == language_model_shapes(config)


@pytest.mark.parametrize("activation", ["gelu", "squared_relu"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_computes_a_pre_norm_decoder(activation: str, tied: bool) -> None:
    """Written out once more from its parameters alone; positions as rotations of the complex plane."""
    model = tiny_matlm(matlm_config(activation=activation, tie_word_embeddings=tied))
    p = {name: value.double() for name, value in model.named_parameters()}
    turn = torch.polar(
        torch.ones(12, 4, dtype=torch.float64),
        torch.outer(torch.arange(12.0, dtype=torch.float64), 10_000.0 ** (-torch.arange(4).double() / 4)),
    )
    x = p["embed_tokens.weight"][IDS]
    for at in ("layers.0", "layers.1", "layers.2"):
        q, k, v = (
            (_norm(x) @ p[f"{at}.attention.{part}.weight"].T).reshape(2, 12, 4, 8).movedim(2, 1)
            for part in ("query", "key", "value")
        )
        q, k = (torch.complex(y[..., :4], y[..., 4:]) * turn for y in (q, k))
        scores = (q @ k.mH).real / math.sqrt(8)
        scores.masked_fill_(torch.ones(12, 12).triu(1).bool(), -math.inf)
        context = (scores.softmax(-1) @ v).movedim(1, 2).reshape(2, 12, 32)
        x = x + context @ p[f"{at}.attention.output.weight"].T
        inner = _norm(x) @ p[f"{at}.ffn.up.weight"].T
        inner = functional.gelu(inner) if activation == "gelu" else inner.clamp(min=0) ** 2
        x = x + inner @ p[f"{at}.ffn.down.weight"].T
    expected = _norm(x) @ p["embed_tokens.weight" if tied else "lm_head.weight"].T
    torch.testing.assert_close(model(IDS).double(), expected, atol=2e-4, rtol=1e-4)


def test_no_position_sees_a_later_one() -> None:
    model = tiny_matlm(matlm_config())
    changed = IDS.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 64
    assert torch.equal(model(IDS)[:, :7], model(changed)[:, :7])
    assert not torch.equal(model(IDS)[:, 7:], model(changed)[:, 7:])
    torch.testing.assert_close(model(IDS[:, :5]), model(IDS)[:, :5], atol=1e-5, rtol=1e-5)


@settings(max_examples=25)
@given(
    widths=st.tuples(*[st.integers(1, 64)] * 3),
    heads=st.tuples(*[st.integers(1, 4)] * 3),
    activation=st.sampled_from(["gelu", "squared_relu"]),
)
def test_a_submodel_is_the_model_with_the_rest_set_to_zero(
    widths: tuple[int, ...], heads: tuple[int, ...], activation: str
) -> None:
    """Sliced as the spec says; run by the first so many; and the whole with what follows zeroed: one function."""
    config = matlm_config(activation=activation, nested_heads=True)
    model = tiny_matlm(config)
    spec = elastic_spec(config, language_model_shapes(config))
    submodel = spec.from_kinds({"ffn": widths, "heads": heads})
    sliced = MatformerLM(matlm_config(activation=activation, intermediate_size=widths))
    zeroed = {}
    for name, parameter in model.named_parameters():
        part, whole = parameter.data, parameter.data.clone()
        for cut in spec.slices_of(name):
            kept = submodel[cut.axis] * cut.unit
            part = part.narrow(cut.dim, 0, kept)
            whole.narrow(cut.dim, kept, whole.shape[cut.dim] - kept).zero_()
            if cut.dim == 0:
                assert part.data_ptr() == parameter.data_ptr()
                assert part.is_contiguous()
        sliced.get_submodule(name.rpartition(".")[0]).weight = torch.nn.Parameter(part)
        zeroed[name] = whole
    masked = torch.func.functional_call(model, zeroed, (IDS,))
    with torch.no_grad():
        torch.testing.assert_close(sliced(IDS), masked, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model(IDS, widths, heads), sliced(IDS), atol=1e-4, rtol=1e-4)


def test_training_reaches_the_first_neurons_alone() -> None:
    model = tiny_matlm(matlm_config()).requires_grad_(True)
    model(IDS, [8, 16, 64]).sum().backward()
    for layer, width in enumerate([8, 16, 64]):
        ffn = model.get_submodule(f"layers.{layer}.ffn")
        assert ffn.up.weight.grad[:width].abs().sum(1).min() > 0
        assert not ffn.up.weight.grad[width:].any()
        assert not ffn.down.weight.grad[:, width:].any()


def test_widths_must_be_on_the_axes() -> None:
    model = tiny_matlm(matlm_config())
    with pytest.raises(ValueError, match="expected 3 values, one per layer, got 2"):
        model(IDS, [8, 8])
    with pytest.raises(ValueError, match=r"width 65: expected 1\.\.64 neurons"):
        model(IDS, [8, 65, 8])


def test_the_bias_of_the_down_projection_is_whole_at_every_level() -> None:
    ffn = NestedFFN(4, 8, "gelu", bias=True).requires_grad_(False)
    x = torch.randn(3, 4)
    assert torch.equal(ffn(x, 8), ffn(x))
    expected = functional.gelu(x @ ffn.up.weight[:2].T + ffn.up.bias[:2]) @ ffn.down.weight[:, :2].T + ffn.down.bias
    torch.testing.assert_close(ffn(x, 2), expected)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
