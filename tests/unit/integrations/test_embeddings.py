"""What ``encode`` returns, in every form, against sentence-transformers itself."""

from __future__ import annotations

from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.integrations import SentenceEncoder
from nestforge.integrations.quantise import quantised
from support.tiny_models import WORDS

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
TEXTS = ["a dog", "the quick fox runs", "model", " ".join(WORDS)]


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
def test_precisions_are_of_the_vectors_that_are_asked_for(
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
