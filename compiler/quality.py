"""How much of the universal model a submodel keeps, on text that no stage has seen."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..runtime.manifest import EngineEntry, Manifest, Quality
from ..runtime.runner import runner_for
from ..runtime.text import TextEncoder
from ..runtime.threads import threads_or_default
from ..strict import structure, unstructure
from .build_engine import EngineBuilder
from .cases import text_feeds
from .clock import Clock
from .corpus import Corpus

_NEIGHBOURS = 10


def measure_quality(
    builder: EngineBuilder,
    encoder: TextEncoder | None,
    engines: Sequence[EngineEntry],
    corpus: Corpus | None,
    clock: Clock,
) -> Mapping[str, Quality]:
    """Quality of every submodel against the universal model on the held-out texts; empty without texts.

    What is compared is the model's text embedding; without one its first output per token, averaged over real tokens;
    without that its last output with features.

    Texts are truncated to the bucket with the longest sequence, for both models alike.
    """
    if corpus is None or encoder is None:
        return {}
    bucket = max({engine.bucket for engine in engines}, key=lambda b: (b.sequence, -b.batch))
    digest = hashlib.sha256("\n".join(corpus.held_out).encode()).hexdigest()
    universal = builder.build(builder.universal.spec.universal(), bucket)
    reference = _embeddings(builder, encoder, universal, corpus.held_out)
    quality = {}
    for engine in clock.each([e for e in engines if e.bucket == bucket and e.segment is None]):

        def assess(engine: EngineEntry = engine) -> Any:
            found = _embeddings(builder, encoder, engine, corpus.held_out)
            cosine, recall = mean_cosine(reference, found), recall_at(reference, found, _NEIGHBOURS)
            return unstructure(Quality(len(corpus.held_out), cosine, recall, digest))

        data = builder.stage.once_json(f"quality-{engine.file}.json", assess)
        quality[engine.submodel] = structure(Quality, data, f"quality of {engine.submodel}", RuntimeError)
    return quality


def mean_cosine(reference: np.ndarray, found: np.ndarray) -> float:
    """Mean cosine similarity of rows ``[texts, H]``."""
    return float(np.mean(np.sum(_unit(reference) * _unit(found), axis=1)))


def recall_at(reference: np.ndarray, found: np.ndarray, k: int) -> float:
    """Mean share of each text's ``k`` nearest other texts by ``reference`` that are among its ``k`` by ``found``."""
    k = min(k, len(reference) - 1)
    near = [_nearest(embeddings, k) for embeddings in (reference, found)]
    return float(np.mean([len(set(a) & set(b)) / k for a, b in zip(*near, strict=True)]))


def _nearest(embeddings: np.ndarray, k: int) -> list[list[int]]:
    scores = _unit(embeddings) @ _unit(embeddings).T
    np.fill_diagonal(scores, -np.inf)
    nearest: list[list[int]] = np.argsort(-scores, axis=1, kind="stable")[:, :k].tolist()
    return nearest


def _unit(rows: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float64)
    unit: np.ndarray = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)
    return unit


def _compared_output(manifest: Manifest) -> str:
    if manifest.text and manifest.text.embedding:
        return manifest.text.embedding
    features = [spec for spec in manifest.outputs if len(spec.dims) > 1]
    return next((spec.name for spec in features if "sequence" in spec.dims), features[-1].name)


def _embeddings(builder: EngineBuilder, encoder: TextEncoder, engine: EngineEntry, texts: Sequence[str]) -> np.ndarray:
    """One row per text ``[texts, H]``."""
    manifest = builder.draft.manifest
    names = [spec.name for spec in manifest.outputs]
    wanted = _compared_output(manifest)
    spec = manifest.outputs[names.index(wanted)]
    batch = engine.bucket.batch
    rows = []
    with runner_for(builder.draft, engine, "packed", threads_or_default(None)) as runner:
        for start in range(0, len(texts), batch):
            part = texts[start : start + batch]
            full = text_feeds(encoder, manifest.inputs, part, engine.bucket)
            output = runner.run(full)[names.index(wanted)][: len(part)]
            if "sequence" in spec.dims:
                mask = full[manifest.text.mask] if manifest.text and manifest.text.mask else np.ones(output.shape[:2])
                weights = mask[: len(part), :, None]
                output = (output * weights).sum(1) / np.maximum(weights.sum(1), 1)
            rows.append(output)
    return np.concatenate(rows)
