"""A T5 whose encoder was made conditional, with the decoder that it has: at r = 1 it is transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nestforge
import pytest
import torch
from nestforge.compiler.parity.reference import in_float64, widened
from nestforge.errors import CheckpointError
from nestforge.exporters.families.coda.encoder_decoder import load_model
from nestforge.exporters.source import open_source
from support.tiny_coda_t5 import SETTINGS, save_small_t5
from support.tiny_models import save_tiny_encoder
from support.tiny_t5 import V1_1


@pytest.mark.parametrize(
    "changes",
    [{}, V1_1, {**V1_1, "feed_forward_proj": "gated-relu", "num_decoder_layers": 2}],
    ids=["first", "v1.1", "gated relu"],
)
def test_at_one_it_is_the_t5_that_it_was_made_of(tmp_path: Path, changes: dict[str, Any]) -> None:
    import transformers

    folder = save_small_t5(tmp_path / "m", **changes)
    report = nestforge.convert_coda(folder, tmp_path / "out", SETTINGS, with_decoder=True)
    assert (report.left_out, report.decoder_layers) == ((), changes.get("num_decoder_layers", 1))
    assert (tmp_path / "out" / "generation_config.json").is_file()
    dense = widened(transformers.T5ForConditionalGeneration.from_pretrained(folder).eval().requires_grad_(False))
    ours = widened(load_model(tmp_path / "out"))
    ours.encoder.reduction = 1
    draw = torch.Generator().manual_seed(0)
    read, written = (torch.randint(3, 40, (2, 9), generator=draw) for _ in range(2))
    mask = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    with in_float64(), torch.no_grad():
        expected = dense(input_ids=read, attention_mask=mask, decoder_input_ids=written).logits
        found = ours(read, mask, written)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_sizes_are_those_of_the_folder(tmp_path: Path) -> None:
    report = nestforge.convert_coda(save_small_t5(tmp_path / "m"), tmp_path / "out", SETTINGS, with_decoder=True)
    source = open_source(tmp_path / "out")
    whole = source.spec.universal()
    assert report.parameters == source.parameters(whole)
    assert report.groups["routers"] == 16
    assert source.spec.universal().id == "ffn32-coda.reduction1"


def test_folders_without_a_decoder_are_refused(tmp_path: Path) -> None:
    from support.tiny_t5 import save_t5

    alone = save_t5(
        tmp_path / "t5",
        "T5EncoderModel",
        text=False,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
    )
    for folder in (alone, save_tiny_encoder(tmp_path / "bert", num_hidden_layers=1)):
        with pytest.raises(CheckpointError, match=r"no decoder to keep; expected a T5ForConditionalGeneration$"):
            nestforge.convert_coda(folder, tmp_path / "out", SETTINGS, with_decoder=True)
    labelled = nestforge.ConversionSettings(adapter_size=4, num_labels=3)
    with pytest.raises(CheckpointError, match="encoder: num_labels: got 3 before a decoder of T5; expected none"):
        nestforge.convert_coda(save_small_t5(tmp_path / "m"), tmp_path / "out", labelled, with_decoder=True)
    assert not (tmp_path / "out").exists()
