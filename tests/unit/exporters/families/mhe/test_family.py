"""Tests."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.architecture import Folded
from nestforge.exporters.families.mhe.model import Recorded
from nestforge.exporters.family import load_model
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal, magnitude_scores, rank
from safetensors.torch import load_file, save_file
from support.tiny_mhe import decoder_config, save_tiny_mhe, save_tiny_pair, tiny_mhe
from support.tiny_models import edit_config

IDS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_fill(1, torch.tensor([7, 8]), 0)


def test_axes_and_signature(tmp_path: Path) -> None:
    source = open_source(save_tiny_mhe(tmp_path / "m", nested=True))
    assert source.family.name == "mhe_encoder"
    assert source.spec.universal().id == "ffn48-heads4"
    assert (source.spec.trained_nested, source.spec.depth) == (True, 2)
    ids, mask = source.signature.inputs
    assert (ids.name, ids.dims, ids.pad, ids.high) == ("input_ids", ("batch", "sequence"), 0, 40)
    assert (mask.name, mask.row_needs, source.signature.mask) == ("attention_mask", "token", "attention_mask")
    assert (source.signature.max_sequence, source.signature.text) == (24, None)
    assert source.parameter_groups(source.spec.universal()).embedding == (40 + 24) * 32


def test_folded_tensors_are_no_parameters(tmp_path: Path) -> None:
    source = open_source(save_tiny_mhe(tmp_path / "m"))
    universal = load_universal(source)
    folded = source.architecture.folded
    assert isinstance(folded, Folded)
    assert folded.shapes.keys() == source.spec.folded.keys()
    assert not folded.shapes.keys() & universal.parameters().keys()
    stored = universal.stored()
    assert {name: tuple(stored(name).shape) for name in folded.shapes} == folded.shapes
    other = open_source(save_tiny_mhe(tmp_path / "o", attention="mqa"))
    assert (other.architecture.folded, other.spec.folded) == (None, {})


@pytest.mark.parametrize(
    ("head", "name", "dims", "role"),
    [
        ({}, "last_hidden_state", ("batch", "sequence", 32), None),
        ({"head": "masked_lm"}, "logits", ("batch", "sequence", 40), "tokens"),
        ({"head": "classifier", "num_labels": 3}, "logits", ("batch", 3), "classes"),
    ],
)
def test_what_a_head_answers(tmp_path: Path, head: dict[str, Any], name: str, dims: tuple[Any], role: str) -> None:
    source = open_source(save_tiny_mhe(tmp_path / "m", **head))
    (output,) = source.signature.outputs
    assert (output.name, output.dims, output.role) == (name, dims, role)
    universal = load_universal(source)
    (found,) = universal.module(IDS, MASK)
    assert found.shape == tuple({"batch": 2, "sequence": 9}.get(dim, dim) for dim in dims)
    assert torch.equal(found, load_model(tmp_path / "m")(IDS, MASK))


@pytest.mark.parametrize("attention", ["mha", "mqa", "skv", "mhe_add", "mhe_mul"])
def test_heads_may_be_permuted(tmp_path: Path, attention: str) -> None:
    """Rows of tables move with the blocks of the output projection (section 8), so that the function stays."""
    universal = load_universal(open_source(save_tiny_mhe(tmp_path / "m", attention=attention, attention_bias=True)))
    (before,) = universal.module(IDS, MASK)
    ranking, places = rank(universal, magnitude_scores(universal), "magnitude")
    assert ranking.method == "magnitude"
    assert any((order != torch.arange(4)).any() for name, order in places.items() if name.endswith("heads"))
    (after,) = universal.module(IDS, MASK)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


def renamed(folder: Path, old: str, new: str, change: float) -> None:
    """The weights with the tables called ``old`` called ``new``, with ``change`` added."""
    tensors = load_file(folder / "model.safetensors")
    changed = {
        name.replace(f".{old}.", f".{new}."): value + change if f".{old}." in name else value
        for name, value in tensors.items()
    }
    save_file(changed, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("settings", "old", "new", "change", "problem"),
    [
        ({}, "embedding", "factor", 1.0, "holds 1+e, but config.json says factors 'e' of mhe_mul; 1 would be added tw"),
        (
            {"factors": "1+e"},
            "factor",
            "embedding",
            -1.0,
            "holds e, but config.json says factors '1+e' of mhe_mul; 1 w",
        ),
        (
            {"attention": "mhe_add"},
            "embedding",
            "factor",
            0.0,
            "holds 1+e, but config.json says factors None of mhe_add",
        ),
    ],
    ids=["added twice", "left out", "no factors of mhe_add"],
)
def test_a_tables_name_and_the_configuration_say_the_same_of_its_one(
    tmp_path: Path, settings: dict[str, Any], old: str, new: str, change: float, problem: str
) -> None:
    folder = save_tiny_mhe(tmp_path / "m", **settings)
    expected = load_model(folder)(IDS, MASK)
    renamed(folder, old, new, change)
    with pytest.raises(CheckpointError, match=re.escape(f"tensor layers.0.attention.{new}.key {problem}")):
        open_source(folder)
    if "attention" not in settings:
        edit_config(folder, factors="e" if settings else "1+e")
        torch.testing.assert_close(load_model(folder)(IDS, MASK), expected, rtol=0, atol=1e-5)


def test_tables_in_another_layout_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_mhe(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = "layers.1.attention.embedding.value"
    save_file({**tensors, name: tensors[name].flatten()}, folder / "model.safetensors")
    problem = f"tensor {name} has shape [32]; expected [4, 8], a row for each head in the order of the blocks of "
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        open_source(folder)


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
    assert {(layer.heads, layer.size) for layer in cached.layers} == {(heads, 8)}
    assert cached.problem is None
    assert bool(cached.cache_axes) == (attention in ("mha", "skv")), (
        "every head has keys of its own, and heads are elastic"
    )


def test_a_rotary_model_keeps_every_heads_keys(tmp_path: Path) -> None:
    folder = save_tiny_mhe(tmp_path / "m", decoder=True, position="rotary", elastic_heads=False)
    cached = open_source(folder).architecture.cached
    assert [(layer.heads, layer.size) for layer in cached.layers] == [(4, 8)] * 2


@pytest.mark.parametrize("attention", ["mha", "mhe_add", "mhe_mul"])
def test_what_is_recorded_is_the_models_own_pass(attention: str) -> None:
    model = tiny_mhe(decoder_config(attention=attention, attention_bias=True)).double()
    logits, *kept = Recorded(model)(IDS)
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


def test_axes_and_signature_of_a_translation_model(tmp_path: Path) -> None:
    source = open_source(save_tiny_pair(tmp_path / "m", nested=True))
    assert source.family.name == "mhe_encoder_decoder"
    assert [axis.name for axis in source.spec.axes] == [
        "encoder.layers.0.ffn",
        "encoder.layers.0.heads",
        "decoder.layers.0.ffn",
        "decoder.layers.0.heads",
        "decoder.layers.0.cross_heads",
    ]
    assert (source.spec.universal().id, source.spec.depth) == ("ffn48-heads4-cross_heads4", 2)
    assert [spec.name for spec in source.signature.inputs] == ["input_ids", "attention_mask", "decoder_input_ids"]
    (logits,) = source.signature.outputs
    assert (logits.dims, logits.role) == (("batch", "sequence", 40), "next_tokens")
    assert source.parameter_groups(source.spec.universal()).embedding == (40 + 24) * 32
    cached = source.architecture.cached
    assert (cached.encoder.start, cached.encoder.positions, cached.cache_axes) == (1, 24, ())


def test_a_text_feeds_both_sides(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    text = open_source(folder).signature.text
    assert (text.mask, text.shifted, text.start) == ("attention_mask", "decoder_input_ids", 1)
