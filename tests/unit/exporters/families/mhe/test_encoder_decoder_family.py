from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.families.mhe.model import load_model
from nestforge.exporters.ranking import magnitude_scores, rank
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from safetensors.torch import load_file, save_file
from support.tiny_mhe import save_tiny_pair

DRAW = torch.Generator().manual_seed(0)
PAIR = (
    torch.randint(0, 40, (2, 6), generator=DRAW),
    torch.ones(2, 6, dtype=torch.int64),
    torch.randint(0, 40, (2, 6), generator=DRAW),
)


def test_axes_and_signature(tmp_path: Path) -> None:
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
    assert cached is not None
    assert cached.encoder is not None
    assert (cached.encoder.start, cached.encoder.positions, cached.kept) == (1, 24, ())


def test_a_text_feeds_both_sides(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    text = open_source(folder).signature.text
    assert text is not None
    assert (text.mask, text.shifted, text.start) == ("attention_mask", "decoder_input_ids", 1)


def test_a_narrowed_module_is_one_with_the_rest_at_zero(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "m")
    universal = load_universal(open_source(folder))
    zeroed = load_model(folder)
    zeroed.get_submodule("encoder.layers.0.attention").output.weight[:, 24:] = 0
    zeroed.get_submodule("decoder.layers.0.attention").output.weight[:, 16:] = 0
    zeroed.get_submodule("decoder.layers.0.cross_attention").output.weight[:, 8:] = 0
    narrow = universal.narrow(universal.spec.parse("ffn48-heads3x1_2x1-cross_heads1"))
    torch.testing.assert_close(narrow(*PAIR)[0], zeroed(*PAIR), rtol=0, atol=1e-5)


def test_heads_and_neurons_of_both_sides_are_ranked_without_changing_the_function(tmp_path: Path) -> None:
    universal = load_universal(open_source(save_tiny_pair(tmp_path / "m")))
    universal.module.double()
    cross = "decoder.layers.0.cross_attention.output.weight"
    before, (expected,) = universal.parameters()[cross].clone(), universal.module(*PAIR)
    rank(universal, magnitude_scores(universal), "magnitude")
    torch.testing.assert_close(universal.module(*PAIR)[0], expected, rtol=0, atol=1e-12)
    assert not torch.equal(universal.parameters()[cross], before)


def test_tables_of_the_other_convention_are_refused_in_every_role(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    name = "decoder.layers.0.cross_attention.embedding.key"
    weights[name.replace("embedding", "factor")] = weights.pop(name) + 1
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"cross_attention.factor.key holds 1\+e, but .*1 would be added twice"):
        open_source(folder)
