"""Vectors in fewer bits against the library's own function, on the same numbers."""

from __future__ import annotations

import logging

import nestforge
import numpy as np
import pytest
from nestforge.integrations.quantise import PRECISIONS, Precision, quantised


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
