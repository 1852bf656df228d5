"""Classes of decoders by their names: what they have behind the decoder, and what is refused of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.hugging_face.decoder_interface import (
    NEXT_TOKEN,
    QUESTION,
    SEQUENCE,
    DecoderInterface,
    read_interface,
)

CLASSES = {"Base": None, "ForCausalLM": NEXT_TOKEN, "ForTexts": SEQUENCE, "ForQuestions": QUESTION}


def read(**config: Any) -> DecoderInterface:
    return read_interface(Checkpoint(Path("m"), config, {}), CLASSES, vocabulary=50, hidden=8)


def test_without_a_name_it_is_the_base_model() -> None:
    base = read()
    assert (base.head, base.prefix, base.answers, base.pad) == (None, "", 8, 0)
    assert base.head_shapes(tied=False) == {}
    assert base.cached_form(16, ()) is None


def test_heads_and_what_they_answer() -> None:
    tokens, texts = read(architectures=["ForCausalLM"]), read(architectures=["ForTexts"], num_labels=3, pad_token_id=7)
    assert (tokens.prefix, tokens.answers, texts.answers, texts.pad) == ("model.", 50, 3, 7)
    assert tokens.head_shapes(tied=True) == {}
    assert tokens.head_shapes(tied=False) == {"lm_head.weight": (50, 8)}
    assert texts.head_shapes(tied=True) == {"score.weight": (3, 8)}
    signature = texts.signature(Checkpoint(Path("m"), {}, {}), 16, masked=True)
    assert [spec.name for spec in signature.inputs] == ["input_ids", "attention_mask"]
    assert signature.outputs[0].dims == ("batch", 3)
    assert tokens.cached_form(16, ()) is not None
    assert texts.cached_form(16, ()) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["ForImages"]}, "architectures: expected one of Base, ForCausalLM, .*, got ForImages"),
        ({"architectures": ["ForTexts"]}, "pad_token_id: ForTexts finds the end of a text by it; set it"),
        ({"architectures": ["ForQuestions"], "num_labels": 3}, "num_labels: expected 2 for ForQuestions, got 3"),
    ],
)
def test_refusals(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {expected}"):
        read(**config)
