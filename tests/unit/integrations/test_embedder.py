"""Tokens, inputs and shortened vectors against sentence-transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.integrations import SentenceEncoder
from support.sentence_folders import HIDDEN, Layout, classes
from support.tiny_compile import board
from support.tiny_models import WORDS

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
TEXTS = ["a dog", "the quick fox runs", "model", " ".join(WORDS)]


@pytest.mark.parametrize("asked", [{}, {"prompt": ""}, {"prompt_name": "query", "batch_size": 1}], ids=str)
def test_tokens_are_those_of_the_library(encoder: SentenceEncoder, theirs: Any, asked: dict[str, Any]) -> None:
    found = encoder.encode(TEXTS, output_value="token_embeddings", **asked)
    expected = theirs.encode(TEXTS, output_value="token_embeddings", **asked)
    assert [type(tokens) for tokens in found] == [torch.Tensor] * len(TEXTS)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, **CLOSE)
    alone = encoder.encode(TEXTS[1], output_value="token_embeddings", normalize_embeddings=True, **asked)
    torch.testing.assert_close(alone, expected[1], **CLOSE)
    assert encoder.encode([], output_value="token_embeddings") == []


def test_inputs_are_those_of_the_librarys_tokenizer(encoder: SentenceEncoder, theirs: Any) -> None:
    for asked in ({}, {"prompt": "time "}):
        found, expected = encoder.preprocess(TEXTS, **asked), theirs.preprocess(TEXTS, **asked)
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(found[name], expected[name])
        assert found["modality"] == expected["modality"]
    assert torch.equal(encoder.tokenize(TEXTS)["input_ids"], theirs.tokenize(TEXTS)["input_ids"])
    assert encoder.tokenize([]) == theirs.tokenize([]) == {}
    with pytest.raises(nestforge.InputError, match="inputs: expected a list of texts, got a text"):
        encoder.tokenize("a")  # type: ignore[arg-type]


def test_vectors_are_shortened_for_a_while_or_for_good(
    sentence_bundle: Path, encoder: SentenceEncoder, theirs: Any
) -> None:
    with encoder.truncate_embeddings(4), theirs.truncate_embeddings(4):
        assert encoder.get_embedding_dimension() == theirs.get_embedding_dimension() == 4
        np.testing.assert_allclose(encoder.encode(TEXTS), theirs.encode(TEXTS), **CLOSE)
        assert encoder.encode(TEXTS, truncate_dim=7).shape == theirs.encode(TEXTS, truncate_dim=7).shape
    assert encoder.get_embedding_dimension() == HIDDEN
    with SentenceEncoder(sentence_bundle, truncate_dim=3) as short:
        assert short.encode("a").shape == (3,)
    with pytest.raises(nestforge.InputError, match="truncate_dim: expected 1 to 16, got 0"):
        SentenceEncoder(sentence_bundle, truncate_dim=0)


def test_tokens_are_those_that_are_pooled(tmp_path: Path) -> None:
    """Behind a Dense of the tokens they are no longer the transformer's."""
    layout = Layout("m", lambda m: [m.Dense(HIDDEN, 6, module_input_name="token_embeddings"), m.Pooling(6, "cls")])
    folder = layout.write(tmp_path / "m")
    profile = board(buckets=["4x16"], budgets={"full": {}})
    bundle = nestforge.compile(folder, profile=profile, output=tmp_path / "b", include="budgets")
    theirs = classes().SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    with SentenceEncoder(bundle) as encoder:
        found = encoder.encode(TEXTS[:3], output_value="token_embeddings")
        for mine, its in zip(found, theirs.encode(TEXTS[:3], output_value="token_embeddings"), strict=True):
            torch.testing.assert_close(mine, its, **CLOSE)
        np.testing.assert_allclose(encoder.encode(TEXTS[:3]), theirs.encode(TEXTS[:3]), **CLOSE)
