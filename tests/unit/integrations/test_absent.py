"""What the library's model has and the encoder has not, by name."""

from __future__ import annotations

from typing import Any

import nestforge
import pytest
import torch
from nestforge.integrations import SentenceEncoder
from nestforge.integrations.absent import absent


def test_what_a_bundle_has_not_is_refused_with_the_reason(encoder: SentenceEncoder) -> None:
    with pytest.raises(AttributeError, match="'SentenceEncoder' object has no attribute 'fit': nothing is trained or"):
        encoder.fit([])  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        _ = encoder.nothing  # type: ignore[attr-defined]
    assert not hasattr(encoder, "tokenizer")
    with pytest.raises(nestforge.InputError, match="max_seq_length 8: texts are cut to 12 tokens here; for fewer"):
        encoder.max_seq_length = 8


def test_every_public_method_of_the_library_is_here_or_refused_with_a_reason(
    encoder: SentenceEncoder, theirs: Any
) -> None:
    names = {name for name in dir(theirs) if not name.startswith("_")} - set(dir(torch.nn.Module))
    missing = {name for name in names if not hasattr(encoder, name)}
    assert {name for name in missing if ": " not in absent("SentenceEncoder", name)} == set()
    assert names - missing == {
        *("encode", "encode_query", "encode_document", "encode_multi_process", "preprocess", "tokenize", "evaluate"),
        *("start_multi_process_pool", "stop_multi_process_pool", "truncate_dim", "truncate_embeddings", "device"),
        *("truncate_sentence_embeddings", "similarity", "similarity_pairwise", "similarity_fn_name", "prompts"),
        *("default_prompt_name", "max_seq_length", "get_max_seq_length", "get_embedding_dimension"),
        *("get_sentence_embedding_dimension", "model_card_data"),
    }
