"""Tokens, inputs and shortened vectors against sentence-transformers itself."""

import logging
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.integrations import SentenceEncoder
from nestforge.integrations.embedder import PRECISIONS, Precision, quantised
from support.sentence_folders import HIDDEN, Layout, classes
from support.tiny_compile import board
from support.tokenizer_files import WORDS

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
        encoder.tokenize("a")


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


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows", [2, 150])
def test_numbers_are_the_librarys(precision: Precision, rows: int) -> None:
    from sentence_transformers.util import quantize_embeddings

    vectors = np.random.default_rng(rows).standard_normal((rows, 21)).astype(np.float32)
    vectors[:, 3] = 0.25  # a dimension without a range
    expected = quantize_embeddings(vectors, precision)
    found = quantised(vectors, precision)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_one_vector_has_bits_and_no_ranges() -> None:
    vector = np.array([[1, -1, 0, 2]], np.float32)
    assert quantised(vector, "ubinary").tolist() == [[0b10010000]]
    assert quantised(vector, "binary").tolist() == [[0b10010000 - 128]]
    with pytest.raises(nestforge.InputError, match="precision 'int8': a single vector has no ranges; encode several"):
        quantised(vector, "int8")


def test_no_vector_has_no_numbers() -> None:
    none = np.empty((0, 9), np.float32)
    shapes = {precision: quantised(none, precision).shape for precision in PRECISIONS}
    assert shapes == {"float32": (0, 9), "int8": (0, 9), "uint8": (0, 9), "binary": (0, 2), "ubinary": (0, 2)}


def test_ranges_of_few_vectors_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nestforge"):
        quantised(np.eye(3, dtype=np.float32), "uint8")
        quantised(np.eye(3, dtype=np.float32), "ubinary")
        quantised(np.ones((100, 2), np.float32), "uint8")
    assert [record.getMessage() for record in caplog.records] == [
        "precision uint8: the ranges are those of 3 vectors alone"
    ]


def test_everything_known_of_a_text(encoder: SentenceEncoder, theirs: Any) -> None:
    """The library leaves the padding of a batch in; alone a text has none."""
    rows = encoder.encode(TEXTS, output_value=None, truncate_dim=5, normalize_embeddings=True)
    for text, row in zip(TEXTS, rows, strict=True):
        expected = theirs.encode(text, output_value=None, truncate_dim=5, normalize_embeddings=True)
        assert row.keys() - expected.keys() <= {"token_type_ids"}, "the tiny tokenizer of transformers gives none"
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(row[name], value, **CLOSE)
            else:
                assert row[name] == value
    with pytest.raises(nestforge.InputError, match="precision 'int8': expected None or 'float32' with the output_val"):
        encoder.encode(TEXTS, output_value=None, precision="int8")


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_precisions_are_of_the_vectors_that_are_requested(
    encoder: SentenceEncoder, theirs: Any, precision: Any
) -> None:
    asked = {"normalize_embeddings": True, "truncate_dim": 11}
    found = encoder.encode(TEXTS, precision=precision, **asked)
    np.testing.assert_array_equal(found, quantised(encoder.encode(TEXTS, **asked), precision))
    expected = theirs.encode(TEXTS, precision=precision, **asked)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.abs(found.astype(int) - expected).max() <= (1 if "int8" in precision else 0)
    tensor = encoder.encode(TEXTS, precision=precision, convert_to_tensor=True, **asked)
    assert tensor.numpy().tolist() == found.tolist()
    tokens = encoder.encode(TEXTS, precision=precision, output_value="token_embeddings")
    for mine, its in zip(
        tokens, theirs.encode(TEXTS, precision=precision, output_value="token_embeddings"), strict=True
    ):
        assert (type(mine), mine.dtype, mine.shape) == (np.ndarray, its.dtype, its.shape)
        assert np.abs(mine.astype(int) - its).max() <= (1 if "int8" in precision else 0)
