"""One pool of two processes, which take seconds to start, for everything that is asked of pools."""

from __future__ import annotations

from pathlib import Path

import nestforge
import numpy as np
import pytest
import torch
from nestforge.integrations import SentenceEncoder
from support.tokenizer_files import WORDS

TEXTS = [*WORDS[:5], " ".join(WORDS)]


def test_texts_are_encoded_by_several_processes(sentence_bundle: Path, encoder: SentenceEncoder) -> None:
    with SentenceEncoder(sentence_bundle, budget="half") as half:
        expected = half.encode(TEXTS)
        assert half.truncated == 1
        pool = half.start_multi_process_pool(["cpu", torch.device("cpu")])
        try:
            for asked in ({}, {"chunk_size": 1}, {"batch_size": 1, "normalize_embeddings": True, "truncate_dim": 3}):
                found = half.encode(TEXTS, pool=pool, **asked)
                asked.pop("chunk_size", None)
                np.testing.assert_allclose(found, half.encode(TEXTS, **asked), atol=1e-6)
            before = half.truncated
            np.testing.assert_allclose(half.encode_multi_process(TEXTS, pool, prompt="a "), expected, atol=1e-6)
            assert half.truncated == before + 1
            tokens = half.encode(TEXTS, pool=pool, output_value="token_embeddings", chunk_size=2)
            for mine, own in zip(tokens, half.encode(TEXTS, output_value="token_embeddings"), strict=True):
                torch.testing.assert_close(mine, own)
            quantised = half.encode(TEXTS, pool=pool, precision="ubinary")
            assert quantised.tolist() == half.encode(TEXTS, precision="ubinary").tolist()
            assert half.encode([], pool=pool).shape == half.encode([]).shape
            with pytest.raises(nestforge.InputError, match="text 1: expected text, got 3"):
                half.encode(["a", 3], pool=pool)  # type: ignore[list-item]
            with pytest.raises(nestforge.InputError, match="chunk_size: expected a whole number of at least 1, got 0"):
                half.encode(TEXTS, pool=pool, chunk_size=0)
        finally:
            half.stop_multi_process_pool(pool)
        with pytest.raises(nestforge.InputError, match="pool: is stopped; start another"):
            half.encode(TEXTS, pool=pool)


def test_a_pool_needs_the_folder_and_processors(encoder: SentenceEncoder) -> None:
    for devices in ([], ["cuda:0"], ["cpu", "mps"]):
        with pytest.raises(nestforge.InputError, match="target_devices: expected 'cpu' once for each process"):
            encoder.start_multi_process_pool(devices)
    with pytest.raises(nestforge.InputError, match="give SentenceEncoder the bundle's folder in place of a model"):
        SentenceEncoder(encoder.model).start_multi_process_pool()
