from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.bucket import Bucket
from nestforge.errors import PlanError
from support.gated_decoders import edit_config, save_decoder
from support.tiny_coda_t5 import save_tiny_pair
from support.tiny_compile import board
from support.tiny_gpt2 import save_gpt2
from support.tiny_t5 import save_t5


def asked(folder: Path, profile: Any = "raspberry-pi-5", **options: Any) -> nestforge.Plan:
    return nestforge.plan(folder, profile, buckets=[Bucket(1, 8)], generate=True, **options)


def test_what_cannot_generate_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"generate: narrow cannot: heads of size 4; expected a multiple of 8"):
        asked(save_decoder(tmp_path / "narrow"))
    decoder = save_decoder(tmp_path / "llama", head_dim=8)
    with pytest.raises(PlanError, match=r"in fp32 or of integers, asked for fp16; .* takes longer on halves"):
        asked(decoder, precisions=["fp16"])
    edit_config(decoder, architectures=["LlamaModel"])
    with pytest.raises(PlanError, match=r"generate: llama cannot; expected a causal language model"):
        asked(decoder)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"class_name": "T5EncoderModel"}, r"generate: t5 cannot; expected a causal language model"),
        ({"d_kv": 6}, r"generate: t5 cannot: heads of size 6; expected a multiple of 8"),
    ],
)
def test_an_encoder_decoder_that_cannot_is_refused_too(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(PlanError, match=line):
        asked(save_t5(tmp_path / "t5", text=False, **changes))


def test_what_tensorrt_cannot_run_is_refused(tmp_path: Path) -> None:
    device = board(backend="tensorrt")
    with pytest.raises(PlanError, match=r"for tensorrt engines that keep a cache are in fp32 alone, asked for fp16"):
        asked(save_decoder(tmp_path / "llama", head_dim=8), device, precisions=["fp16"])
    with pytest.raises(
        PlanError, match=r"submodel ffn32-coda.reduction3 cannot for tensorrt: its encoder selects a number of tokens"
    ):
        asked(save_tiny_pair(tmp_path / "pair"), device)


def test_notes_say_what_is_not_followed_and_what_has_not_run(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "llama", head_dim=8, eos_token_id=None)
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4}))
    notes = asked(folder, board(backend="tensorrt", budgets={"full": {}})).notes
    for line in ("does not follow num_beams", "states no eos_token_id", "their plans have not run on a GPU yet"):
        assert sum(line in note for note in notes) == 1, line


def test_tokens_beyond_the_vocabulary_are_noted(tmp_path: Path) -> None:
    """As in a GPT-2 of another vocabulary, whose class has 50256 by default; transformers generates with it."""
    notes = asked(save_gpt2(tmp_path / "gpt2", n_embd=32, eos_token_id=50256, bos_token_id=50256)).notes
    assert (
        "the model's folder states eos_token_id 50256, bos_token_id 50256, beyond its vocabulary of 48 tokens: no such "
        "token can come"
    ) in notes
    assert (
        "the model's folder states no eos_token_id of its vocabulary: a text ends at a stop of the request's or at its "
        "`max_tokens`"
    ) in notes
