from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nestforge.compiler import quality as module
from nestforge.compiler.build_engine import EngineBuilder
from nestforge.compiler.clock import Clock, silent
from nestforge.compiler.corpus import Corpus
from nestforge.compiler.quality import mean_cosine, measure_quality, recall_at
from nestforge.compiler.rank_axes import text_encoder
from nestforge.runtime.manifest import EngineEntry
from tiny_compile import BUCKET
from tiny_models import WORDS

TEXTS = tuple(f"{a} {b} {c}" for a, b, c in zip(WORDS, WORDS[3:], WORDS[5:], strict=False))
CORPUS = Corpus(("the fox",), TEXTS)


def test_cosine_by_hand() -> None:
    reference = np.array([[1.0, 0.0], [0.0, 2.0]])
    found = np.array([[5.0, 0.0], [3.0, 3.0]])
    assert mean_cosine(reference, found) == pytest.approx((1 + 0.5**0.5) / 2)
    assert mean_cosine(reference, -reference) == pytest.approx(-1)


def test_recall_by_hand() -> None:
    angles = np.array([0, 10, 25, 90, 105])
    reference = np.stack([np.cos(np.radians(angles)), np.sin(np.radians(angles))], axis=1)
    moved = reference[[0, 1, 3, 2, 4]]  # texts 2 and 3 change places
    # nearest other two: 0:{1,2} 1:{0,2} 2:{1,0} 3:{4,2} 4:{3,2}, and with the places changed
    #                    0:{1,3} 1:{0,3} 2:{4,3} 3:{1,0} 4:{2,3}
    assert recall_at(reference, moved, 2) == pytest.approx((1 + 1 + 0 + 0 + 2) / 10)
    assert recall_at(reference, reference, 2) == 1.0


@given(st.integers(0, 10**6), st.integers(2, 30), st.integers(1, 40))
def test_recall_knows_neither_scale_nor_rotation_nor_order(seed: int, texts: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    reference, found = rng.standard_normal((2, texts, 6))
    rotation = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    order = rng.permutation(texts)
    recall = recall_at(reference, found, k)
    assert 0 <= recall <= 1
    assert recall_at(reference, reference @ rotation * 7, k) == 1.0
    assert recall_at(reference[order], found[order], k) == pytest.approx(recall)


def _engines(builder: EngineBuilder, *ids: str) -> list[EngineEntry]:
    return [builder.build(builder.universal.spec.parse(name), BUCKET) for name in ids]


def test_without_texts_or_tokenizer_nothing_is_claimed(builder: EngineBuilder) -> None:
    engines = _engines(builder, "ffn32-heads2")
    assert measure_quality(builder, None, engines, CORPUS, Clock(silent)) == {}
    assert measure_quality(builder, text_encoder(builder.universal), engines, None, Clock(silent)) == {}


def test_quality_equals_what_pytorch_says(builder: EngineBuilder) -> None:
    """Independent of engines, buckets and padding: one text at a time through the narrowed modules."""
    encoder = text_encoder(builder.universal)
    assert encoder is not None
    engines = _engines(builder, "ffn8-heads1", "ffn32-heads2")
    quality = measure_quality(builder, encoder, engines, CORPUS, Clock(silent))

    def embeddings(submodel_id: str) -> np.ndarray:
        narrowed = builder.universal.narrow(builder.universal.spec.parse(submodel_id))
        feeds = [encoder.encode([text], BUCKET.sequence, truncate=True).feeds.values() for text in TEXTS]
        return np.concatenate([narrowed(*map(torch.from_numpy, values))[-1].numpy() for values in feeds])

    universal, small = embeddings("ffn32-heads2"), embeddings("ffn8-heads1")
    assert quality["ffn8-heads1"].mean_cosine == pytest.approx(mean_cosine(universal, small), abs=1e-5)
    assert quality["ffn8-heads1"].recall_at_10 == pytest.approx(recall_at(universal, small, 10))
    assert quality["ffn8-heads1"].mean_cosine < 0.999
    whole = quality["ffn32-heads2"]
    assert (whole.texts, whole.recall_at_10) == (len(TEXTS), 1.0)
    assert whole.mean_cosine == pytest.approx(1.0)


def test_a_model_without_embedding_is_averaged_over_real_tokens(builder: EngineBuilder) -> None:
    text = replace(builder.draft.manifest.text, embedding=None)
    plain = replace(builder, draft=replace(builder.draft, manifest=replace(builder.draft.manifest, text=text)))
    encoder = text_encoder(builder.universal)
    assert encoder is not None
    (engine,) = _engines(plain, "ffn32-heads2")
    found = module._embeddings(plain, encoder, engine, TEXTS[:3])
    for row, text_ in zip(found, TEXTS, strict=False):
        feeds = encoder.encode([text_], 8).feeds  # not padded, so every position is a real token
        hidden = builder.universal.module(*map(torch.from_numpy, feeds.values()))[0]
        np.testing.assert_allclose(row, hidden[0].mean(0).numpy(), atol=1e-5)


def test_what_was_measured_is_not_measured_again(builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, engines = text_encoder(builder.universal), _engines(builder, "ffn8-heads1")
    first = measure_quality(builder, encoder, engines, CORPUS, Clock(silent))
    monkeypatch.setattr(module, "mean_cosine", lambda *_: pytest.fail("measured again"))
    assert measure_quality(builder, encoder, engines, CORPUS, Clock(silent)) == first


def test_another_corpus_has_another_hash(builder: EngineBuilder, tmp_path: Path) -> None:
    encoder, engines = text_encoder(builder.universal), _engines(builder, "ffn8-heads1")
    one = measure_quality(builder, encoder, engines, CORPUS, Clock(silent))["ffn8-heads1"]
    (builder.stage.work / f"quality-{engines[0].file}.json").unlink()
    other = measure_quality(builder, encoder, engines, replace(CORPUS, held_out=TEXTS[1:]), Clock(silent))
    assert other["ffn8-heads1"].data_sha256 != one.data_sha256
    assert other["ffn8-heads1"].texts == one.texts - 1
