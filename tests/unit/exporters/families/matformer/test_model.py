"""MatLM's keys and values, recorded in its own pass."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.exporters.families.matformer.family import elastic_spec, language_parameters
from nestforge.exporters.families.matformer.model import MatformerLM, RecordedLM, distance_buckets
from support.tiny_matlm import matlm_config, tiny_matlm
from torch.nn import functional
from transformers.models.t5.modeling_t5 import T5Attention

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
# Positions, biases and norms as the paper's parameter counts have them, and each of them alone.
AS_COUNTED: dict[str, Any] = {"position": "relative_bias", "bias": True, "norm_weights": True}
KINDS = [{}, AS_COUNTED, *({key: value} for key, value in AS_COUNTED.items())]


@pytest.mark.parametrize(
    "changes",
    [
        *KINDS,
        {**AS_COUNTED, "tie_word_embeddings": False},
        {"tie_word_embeddings": False},
        {"intermediate_size": (8, 64, 24)},
        {"nested_heads": True},
    ],
)
def test_the_modules_parameters_are_those_that_its_config_says(changes: dict[str, Any]) -> None:
    config = matlm_config(**changes)
    with torch.device("meta"):
        model = MatformerLM(config)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == language_parameters(config).shapes


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("activation", ["gelu", "squared_relu"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_computes_a_pre_norm_decoder(activation: str, tied: bool, kind: dict[str, Any]) -> None:
    """Written out once more from its parameters alone; rotary positions as rotations of the complex plane, a relative
    bias by T5's own rule."""
    model = tiny_matlm(matlm_config(activation=activation, tie_word_embeddings=tied, **kind))
    p = {name: value.double() for name, value in model.named_parameters()}
    relative = torch.arange(12)[None, :] - torch.arange(12)[:, None]
    bucket = T5Attention._relative_position_bucket(relative, bidirectional=False)
    turn = torch.polar(
        torch.ones(12, 4, dtype=torch.float64),
        torch.outer(torch.arange(12.0, dtype=torch.float64), 10_000.0 ** (-torch.arange(4).double() / 4)),
    )
    x = p["embed_tokens.weight"][IDS]
    for at in ("layers.0", "layers.1", "layers.2"):
        q, k, v = (
            _linear(p, f"{at}.attention.{part}", _norm(p, f"{at}.attention_norm", x)).reshape(2, 12, 4, 8).movedim(2, 1)
            for part in ("query", "key", "value")
        )
        if "position" in kind:
            scores = q @ k.mT / math.sqrt(8) + p[f"{at}.relative_bias.weight"].T[bucket].movedim(2, 0)
        else:
            q, k = (torch.complex(y[..., :4], y[..., 4:]) * turn for y in (q, k))
            scores = (q @ k.mH).real / math.sqrt(8)
        scores.masked_fill_(torch.ones(12, 12).triu(1).bool(), -math.inf)
        context = (scores.softmax(-1) @ v).movedim(1, 2).reshape(2, 12, 32)
        x = x + _linear(p, f"{at}.attention.output", context)
        inner = _linear(p, f"{at}.ffn.up", _norm(p, f"{at}.ffn_norm", x))
        inner = functional.gelu(inner) if activation == "gelu" else inner.clamp(min=0) ** 2
        x = x + _linear(p, f"{at}.ffn.down", inner)
    words = p["embed_tokens.weight" if tied else "lm_head.weight"]
    expected = _norm(p, "norm", x) @ words.T + p.get("lm_head.bias", 0.0)
    torch.testing.assert_close(model(IDS).double(), expected, atol=2e-4, rtol=1e-4)


@settings(max_examples=25)
@given(
    widths=st.tuples(*[st.integers(1, 64)] * 3),
    heads=st.tuples(*[st.integers(1, 4)] * 3),
    activation=st.sampled_from(["gelu", "squared_relu"]),
    kind=st.sampled_from(KINDS),
)
def test_a_submodel_is_the_model_with_the_rest_set_to_zero(
    widths: tuple[int, ...], heads: tuple[int, ...], activation: str, kind: dict[str, Any]
) -> None:
    """Sliced as the spec says, and the whole with what follows zeroed: one function."""
    config = matlm_config(activation=activation, nested_heads=True, **kind)
    model = tiny_matlm(config)
    spec = elastic_spec(config, language_parameters(config))
    submodel = spec.from_kinds({"ffn": widths, "heads": heads})
    sliced = MatformerLM(matlm_config(activation=activation, intermediate_size=widths, **kind))
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
        module, _, attribute = name.rpartition(".")
        setattr(sliced.get_submodule(module), attribute, torch.nn.Parameter(part))
        zeroed[name] = whole
    masked = torch.func.functional_call(model, zeroed, (IDS,))
    with torch.no_grad():
        torch.testing.assert_close(sliced(IDS), masked, atol=1e-4, rtol=1e-4)


def _norm(p: dict[str, torch.Tensor], at: str, x: torch.Tensor) -> torch.Tensor:
    plain = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    return plain * p.get(f"{at}.weight", 1.0) + p.get(f"{at}.bias", 0.0)


def _linear(p: dict[str, torch.Tensor], at: str, x: torch.Tensor) -> torch.Tensor:
    return x @ p[f"{at}.weight"].T + p.get(f"{at}.bias", 0.0)


def _t5_bucket(relative: torch.Tensor) -> torch.Tensor:
    """The oracle: T5's own rule, of keys' places relative to their query."""
    return T5Attention._relative_position_bucket(relative, bidirectional=False, num_buckets=32)


@pytest.mark.parametrize("length", [1, 2, 40, 200])
def test_buckets_of_every_query_and_key(length: int) -> None:
    place = torch.arange(length)
    expected = _t5_bucket(place[None, :] - place[:, None])
    assert torch.equal(distance_buckets(length, torch.device("cpu")), expected)


TEXTS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


@torch.no_grad()
def test_a_recorded_pass_is_the_models_own() -> None:
    model = tiny_matlm(matlm_config())
    logits, *kept = RecordedLM(model)(TEXTS)
    torch.testing.assert_close(logits, model(TEXTS))
    assert [tuple(tensor.shape) for tensor in kept] == [(2, 4, 6, 8)] * 6
    first = model.layers[0]
    values = first.attention.value(first.attention_norm(model.embed_tokens(TEXTS)))
    torch.testing.assert_close(kept[1], values.view(2, 6, 4, 8).transpose(1, 2))
