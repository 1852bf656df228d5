from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.errors import CheckpointError, ExportError
from nestforge.exporters.families.coda.encoder_decoder import load_model
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from safetensors.torch import load_file, save_file
from support.tiny_coda_t5 import encoder_config, save_tiny_pair

DRAW = torch.Generator().manual_seed(0)
PAIR = (
    torch.randint(0, 40, (2, 6), generator=DRAW),
    torch.ones(2, 6, dtype=torch.int64),
    torch.randint(0, 40, (2, 6), generator=DRAW),
)


def test_signature_and_how_it_generates(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    source = open_source(folder)
    assert source.family.name == "coda_encoder_decoder"
    assert [spec.name for spec in source.signature.inputs] == ["input_ids", "attention_mask", "decoder_input_ids"]
    text, cached = source.signature.text, source.architecture.cached
    assert text is not None
    assert (text.mask, text.shifted, text.start) == ("attention_mask", "decoder_input_ids", 0)
    with pytest.raises(ExportError, match="one number for each length; ask for static buckets"):
        source.signature.buckets([Bucket(1, 8, None, 1)], [])
    assert cached is not None
    assert cached.encoder is not None
    assert (cached.encoder.start, cached.encoder.positions, cached.encoder.axes) == (0, 24, ("coda.reduction",))
    assert cached.problem is None


def test_another_k_holds_in_buckets_and_for_no_prompt(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "m", encoder=encoder_config(tokens_selected={"8": {"3": 2}}))
    source, model = open_source(folder), load_model(folder)
    reduced = source.spec.parse("ffn32-coda.reduction3")
    routes = {length: source.routes(reduced, Bucket(1, length))[0].shape for length in (8, 12)}
    assert routes == {8: (1, 2), 12: (1, 4)}
    model.encoder.reduction = 3
    assert (model.encoder.counts(8), model.encoder.counts(12)) == ({0: 2}, {0: 4})
    assert source.architecture.cached is not None
    assert source.architecture.cached.problem == "tokens_selected says k of rows of some lengths, and a prompt has any"


def test_a_narrowed_module_is_one_with_the_rest_at_zero(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "m")
    universal, zeroed = load_universal(open_source(folder)), load_model(folder)
    zeroed.encoder.reduction = 3
    zeroed.get_submodule("encoder.layers.0.ffn").down.weight[:, 16:] = 0
    zeroed.get_submodule("decoder.block.0.layer.2.DenseReluDense").wo.weight[:, 8:] = 0
    narrow = universal.narrow(universal.spec.parse("ffn16x1_8x1-coda.reduction3"))
    torch.testing.assert_close(narrow(*PAIR)[0], zeroed(*PAIR), rtol=0, atol=1e-5)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["shared.weight"] = weights["encoder.embeddings.word.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"shared\.weight"):
        open_source(folder)
