"""Classes of decoders by their names: what they have behind the decoder, and what is refused of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from nestforge.bucket import Bucket
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.checkpoints.config import read_classes
from nestforge.exporters.hugging_face.interface import (
    LAST_TOKEN_CLASSES,
    NEXT_TOKEN,
    QUESTION,
    TextModel,
    attention_problems,
    read_decoder,
)
from nestforge.exporters.hugging_face.tensors import Parameters
from nestforge.exporters.source import open_source
from nestforge.tools.cli import main
from support.gated_decoders import save_decoder
from support.tiny_models import save_t5

CLASSES = {"Base": None, "ForCausalLM": NEXT_TOKEN, "ForTexts": LAST_TOKEN_CLASSES, "ForQuestions": QUESTION}


def read(**config: Any) -> TextModel:
    checkpoint = Checkpoint(Path("m"), config, {})
    head, pad = read_decoder(checkpoint, CLASSES, vocabulary=50)
    sizes = {"hidden": 8, "embedding": 8, "vocabulary": 50, "heads": 2, "head_dim": 4, "positions": 16}
    return TextModel(head=head, **sizes, widths=(32,), classes=read_classes(checkpoint), pad=pad, tied=True)


def head_shapes(model: TextModel, tied: bool) -> dict[str, tuple[int, ...]]:
    found = Parameters()
    assert model.head is not None
    model.head.add_to(found, model.size, tied)
    return found.shapes


def test_without_a_name_it_is_the_base_model() -> None:
    base = read()
    assert (base.head, base.prefix, base.pad) == (None, "", 0)
    assert list(base.head_ops(Bucket(1, 4))) == []
    assert base.cached_spec(()) is None


def test_heads_and_what_they_answer() -> None:
    tokens, texts = read(architectures=["ForCausalLM"]), read(architectures=["ForTexts"], num_labels=3, pad_token_id=7)
    assert (tokens.prefix, texts.pad) == ("model.", 7)
    assert head_shapes(tokens, tied=True) == {}
    assert head_shapes(tokens, tied=False) == {"lm_head.weight": (50, 8)}
    assert head_shapes(texts, tied=True) == {"score.weight": (3, 8)}
    signature = texts.signature(Checkpoint(Path("m"), {}, {}), "first_token")
    assert [spec.name for spec in signature.inputs] == ["input_ids", "attention_mask"]
    assert signature.outputs[0].dims == ("batch", 3)
    assert tokens.cached_spec(()) is not None
    assert texts.cached_spec(()) is None


def test_heads_of_other_classes_may_be_in_the_files() -> None:
    """Its own may have no more than it has, but for a copy of what is tied."""
    is_unused = read(architectures=["ForCausalLM"]).unused(CLASSES.values(), re.compile("old"))
    names = ("score.weight", "qa_outputs.bias", "lm_head.weight", "old")
    assert [is_unused(name) for name in names] == [True] * 4
    names = ("lm_head.bias", "extra.weight", "model.score.weight")  # heads are beside the base model, not in it
    assert [is_unused(name) for name in names] == [False] * 3


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"architectures": ["ForImages"]},
            "architecture 'ForImages' is not supported; supported are Base, For",
        ),
        ({"architectures": ["ForTexts"]}, "pad_token_id: ForTexts finds the end of a text by it; set it"),
        ({"architectures": ["ForQuestions"], "num_labels": 3}, "num_labels: expected 2 for ForQuestions, got 3"),
    ],
)
def test_refusals(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {expected}"):
        read(**config)


RETRAINING = "(multi-query attention) is another function, which takes retraining, and nestforge does not do that"


@pytest.mark.parametrize(
    ("heads", "shared", "expected"),
    [
        (4, 4, "each head has keys and values of its own; making heads share one pair"),
        (4, 2, "4 heads share 2 pairs; making heads share one pair"),
        (4, 1, "all heads share keys and values already, engines that generate keep one pair of them"),
        (1, 1, "each head has keys and values of its own"),
    ],
)
def test_one_line_for_every_form(heads: int, shared: int, expected: str) -> None:
    ((problem,),) = (problems.values() for problems in attention_problems(heads, shared).values())
    assert problem.startswith(expected)
    assert (RETRAINING in problem) == (shared > 1 or heads == 1)


@pytest.mark.parametrize(("pairs", "expected"), [(2, "4 heads share 2 pairs"), (1, "all heads share keys and values")])
def test_the_command_says_it(tmp_path: Path, pairs: int, expected: str) -> None:
    folder = save_decoder(tmp_path / "m", num_attention_heads=4, num_key_value_heads=pairs)
    asked = ["plan", str(folder), "--profile", "raspberry-pi-5", "--variant", "attention=multi_query"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 1
    assert f"variant attention=multi_query: {expected}" in result.output
    cached = open_source(folder).architecture.cached
    assert cached is not None
    assert {layer.heads for layer in cached.layers} == {pairs}, "forms C and D keep no fewer"


def test_t5_says_it_too(tmp_path: Path) -> None:
    problems = open_source(save_t5(tmp_path / "m", text=False)).variant_problems
    assert RETRAINING in problems["attention"]["*"]
