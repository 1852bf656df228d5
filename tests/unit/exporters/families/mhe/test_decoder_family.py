from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nestforge.exporters.families.mhe.generating import RecordedLM
from nestforge.exporters.families.mhe.model import load_model
from nestforge.exporters.source import open_source
from support.tiny_mhe import decoder_config, save_tiny_mhe, tiny_mhe

IDS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))


def test_axes_and_signature(tmp_path: Path) -> None:
    source = open_source(save_tiny_mhe(tmp_path / "m", decoder=True))
    assert source.family.name == "mhe_decoder"
    assert source.spec.universal().id == "ffn48-heads4"
    (ids,), (logits,) = source.signature.inputs, source.signature.outputs
    assert (ids.name, ids.dims, ids.high, source.signature.mask) == ("input_ids", ("batch", "sequence"), 40, None)
    assert (logits.name, logits.dims, logits.role) == ("logits", ("batch", "sequence", 40), "next_tokens")


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": False}, {"position": "rotary"}, {"attention": "sha"}])
def test_it_is_causal(tmp_path: Path, settings: dict[str, object]) -> None:
    model = load_model(save_tiny_mhe(tmp_path / "m", decoder=True, **settings))
    logits = model(IDS)
    changed = IDS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 40
    other = model(changed)
    torch.testing.assert_close(other[:, :5], logits[:, :5], rtol=0, atol=1e-5)
    assert (other[:, 5:] - logits[:, 5:]).abs().amax((0, 2)).min() > 1e-3, "and later positions see it"


@pytest.mark.parametrize(
    ("attention", "heads"),
    [("mha", 4), ("sha", 1), ("mqa", 1), ("skv", 4), ("el_att", 4), ("mhe_add", 1), ("mhe_mul", 1)],
)
def test_what_a_cache_holds(tmp_path: Path, attention: str, heads: int) -> None:
    """Two vectors of a head's size for each token and layer where heads share them (section 6.6)."""
    cached = open_source(save_tiny_mhe(tmp_path / "m", decoder=True, attention=attention)).architecture.cached
    assert cached is not None
    assert {(layer.heads, layer.size) for layer in cached.layers} == {(heads, 8)}
    assert cached.problem is None
    assert bool(cached.kept) == (attention in ("mha", "skv")), "every head has keys of its own, and heads are elastic"


def test_a_rotary_model_keeps_every_heads_keys(tmp_path: Path) -> None:
    folder = save_tiny_mhe(tmp_path / "m", decoder=True, position="rotary", elastic_heads=False)
    cached = open_source(folder).architecture.cached
    assert cached is not None
    assert [(layer.heads, layer.size) for layer in cached.layers] == [(4, 8)] * 2


@pytest.mark.parametrize("attention", ["mha", "mhe_add", "mhe_mul"])
def test_what_is_recorded_is_the_models_own_pass(attention: str) -> None:
    model = tiny_mhe(decoder_config(attention=attention, attention_bias=True)).double()
    logits, *kept = RecordedLM(model)(IDS)
    assert torch.equal(logits, model(IDS))
    first = model.layers[0]
    hidden = first.attention_norm(model.embeddings(IDS))
    shared = attention != "mha"
    assert [tuple(tensor.shape) for tensor in kept] == [(2, 1 if shared else 4, 9, 8)] * 4
    if attention == "mhe_mul":
        torch.testing.assert_close(kept[0][:, 0], hidden @ first.attention.key.weight.T)
    torch.testing.assert_close(
        kept[1][:, 0], first.attention.value(hidden) if shared else first.attention.value(hidden)[..., :8]
    )
