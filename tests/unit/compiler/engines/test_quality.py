from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle
from nestforge.compiler.engines import quality as module
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.engines.quality import measure_quality
from nestforge.compiler.examples.corpus import ArrayCorpus, Corpus
from nestforge.compiler.examples.rank_axes import text_encoder
from nestforge.compiler.work.clock import Clock, silent
from nestforge.runtime.consistency.measure import measure
from nestforge.runtime.consistency.samples import ArraySamples
from nestforge.runtime.consistency.vectors import cosines, recalls_at
from support.tiny_compile import BUCKET
from support.tiny_models import WORDS

TEXTS = tuple(f"{a} {b} {c}" for a, b, c in zip(WORDS, WORDS[3:], WORDS[5:], strict=False))
CORPUS = Corpus(("the fox",), TEXTS)


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
    figures = quality["ffn8-heads1"].figures
    assert figures["mean_cosine"] == pytest.approx(cosines(universal, small).mean(), abs=1e-5)
    assert figures["recall_at_10"] == pytest.approx(recalls_at(universal, small, 10).mean())
    assert figures["mean_cosine"] < 0.999
    whole = quality["ffn32-heads2"]
    assert (whole.samples, whole.positions) == (len(TEXTS), None)
    assert whole.figures == {"mean_cosine": pytest.approx(1.0), "recall_at_10": 1.0}


def test_a_model_without_embedding_is_averaged_over_real_tokens(builder: EngineBuilder) -> None:
    text = replace(builder.draft.manifest.text, embedding=None)
    plain = replace(builder, draft=replace(builder.draft, manifest=replace(builder.draft.manifest, text=text)))
    encoder = text_encoder(builder.universal)
    assert encoder is not None
    quality = measure_quality(plain, encoder, _engines(plain, "ffn8-heads1"), CORPUS, Clock(silent))["ffn8-heads1"]

    def embeddings(submodel_id: str) -> np.ndarray:
        """Texts that are not padded, so that every position is a real token."""
        narrowed = builder.universal.narrow(builder.universal.spec.parse(submodel_id))
        feeds = [encoder.encode([text_], BUCKET.sequence).feeds.values() for text_ in TEXTS]
        return np.stack([narrowed(*map(torch.from_numpy, values))[0][0].mean(0).numpy() for values in feeds])

    expected = cosines(embeddings("ffn32-heads2"), embeddings("ffn8-heads1")).mean()
    assert quality.figures["mean_cosine"] == pytest.approx(expected, abs=1e-5)


def test_what_was_measured_is_not_measured_again(builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, engines = text_encoder(builder.universal), _engines(builder, "ffn8-heads1", "ffn32-heads2")
    first = measure_quality(builder, encoder, engines, CORPUS, Clock(silent))
    measured: list[str] = []

    def spy(bundle: Bundle, universal: EngineEntry, engines: list[EngineEntry], *rest: Any) -> Any:
        measured.extend(engine.submodel for engine in engines)
        return measure(bundle, universal, engines, *rest)

    monkeypatch.setattr(module, "measure", spy)
    assert measure_quality(builder, encoder, engines, CORPUS, Clock(silent)) == first
    assert measured == []
    (builder.stage.work / f"quality-{engines[0].file}.json").unlink()
    again = measure_quality(builder, encoder, engines, CORPUS, Clock(silent))
    assert (again, list(again), measured) == (first, list(first), ["ffn8-heads1"])


def test_another_corpus_has_another_hash(builder: EngineBuilder, tmp_path: Path) -> None:
    encoder, engines = text_encoder(builder.universal), _engines(builder, "ffn8-heads1")
    one = measure_quality(builder, encoder, engines, CORPUS, Clock(silent))["ffn8-heads1"]
    (builder.stage.work / f"quality-{engines[0].file}.json").unlink()
    other = measure_quality(builder, encoder, engines, replace(CORPUS, held_out=TEXTS[1:]), Clock(silent))
    assert other["ffn8-heads1"].data_sha256 != one.data_sha256
    assert other["ffn8-heads1"].samples == one.samples - 1


def test_rows_of_arrays_need_no_tokenizer(builder: EngineBuilder) -> None:
    encoder, engines = text_encoder(builder.universal), _engines(builder, "ffn8-heads1")
    assert encoder is not None
    rows = ArraySamples(encoder.encode(TEXTS, BUCKET.sequence).feeds)
    by_text = measure_quality(builder, encoder, engines, CORPUS, Clock(silent))["ffn8-heads1"]
    (builder.stage.work / f"quality-{engines[0].file}.json").unlink()
    by_rows = measure_quality(builder, None, engines, ArrayCorpus(rows, rows), Clock(silent))["ffn8-heads1"]
    assert by_rows.figures == {name: pytest.approx(value) for name, value in by_text.figures.items()}
    assert by_rows.data_sha256 == rows.sha256
