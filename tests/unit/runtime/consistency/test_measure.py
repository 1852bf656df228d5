from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.manifest import Quality
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.runtime.consistency import measure as module
from nestforge.runtime.consistency.measure import measure
from nestforge.runtime.consistency.samples import ArraySamples
from nestforge.runtime.consistency.vectors import cosines, recalls_at

BUCKET = Bucket(2, 16)


@pytest.fixture
def bundle(tiny_bundle: Path) -> Bundle:
    return open_bundle(tiny_bundle)


@pytest.fixture
def rows() -> ArraySamples:
    rng = np.random.default_rng(3)
    lengths = rng.integers(2, 9, 15)
    mask = (np.arange(9) < lengths[:, None]).astype(np.int64)
    return ArraySamples({"input_ids": rng.integers(1, 16, (15, 9)) * mask, "attention_mask": mask})


def engines(bundle: Bundle, *submodels: str) -> list[EngineEntry]:
    found = {e.submodel: e for e in bundle.manifest.engines if e.bucket == BUCKET}
    return [found[name] for name in submodels]


def measured(bundle: Bundle, samples: ArraySamples, *submodels: str) -> dict[str, Quality]:
    (universal,) = engines(bundle, "ffn32")
    found = measure(bundle, universal, engines(bundle, *submodels), samples, 1, lambda *_: None)
    return {engine.submodel: quality for engine, quality in found}


def as_language_model(bundle: Bundle) -> Bundle:
    """The tiny bundle as if its hidden state foretold the next token: both have 16 values."""
    outputs = (replace(bundle.manifest.outputs[0], role="next_tokens"), bundle.manifest.outputs[1])
    return replace(bundle, manifest=replace(bundle.manifest, outputs=outputs))


def test_embeddings_are_those_that_numpy_says(
    bundle: Bundle, rows: ArraySamples, expected: Callable[..., dict[str, Any]]
) -> None:
    """Independent of engines, buckets and padding."""
    quality = measured(bundle, rows, "ffn16", "ffn32")
    small, universal = (expected(width, *rows.feeds.values())["total"] for width in (16, 32))
    assert quality["ffn16"].figures == {
        "mean_cosine": pytest.approx(cosines(universal, small).mean(), abs=1e-5),
        "recall_at_10": pytest.approx(recalls_at(universal, small, 10).mean()),
    }
    assert quality["ffn16"].figures["mean_cosine"] < 0.999
    assert quality["ffn32"].figures == {"mean_cosine": pytest.approx(1.0), "recall_at_10": 1.0}
    assert (quality["ffn16"].samples, quality["ffn16"].positions) == (15, None)
    assert quality["ffn16"].data_sha256 == rows.sha256


def test_tokens_are_those_that_numpy_says(
    bundle: Bundle, rows: ArraySamples, expected: Callable[..., dict[str, Any]]
) -> None:
    quality = measured(as_language_model(bundle), rows, "ffn16", "ffn32")
    ids, mask = rows.feeds["input_ids"], rows.feeds["attention_mask"]
    small, universal = (expected(width, ids, mask)["hidden"].astype(np.float64) for width in (16, 32))
    agree, losses, forward, backward, prefixes = [], [], [], [], []
    for row in range(15):
        here = []
        for step in range(int(mask[row].sum()) - 1):
            p, q = (np.exp(x[row, step]) / np.exp(x[row, step]).sum() for x in (small, universal))
            here.append(bool(p.argmax() == q.argmax()))
            losses.append(-np.log(p[ids[row, step + 1]]))
            forward.append((p * np.log(p / q)).sum())
            backward.append((q * np.log(q / p)).sum())
        agree += here
        prefixes.append(here.index(False) if False in here else len(here))
    assert quality["ffn16"].figures == {
        "token_agreement": pytest.approx(np.mean(agree)),
        "kl_small_to_universal": pytest.approx(np.mean(forward), rel=1e-4),
        "kl_universal_to_small": pytest.approx(np.mean(backward), rel=1e-4),
        "matched_prefix": pytest.approx(np.mean(prefixes)),
        "loss": pytest.approx(np.mean(losses), rel=1e-4),
    }
    assert 0 < quality["ffn16"].figures["token_agreement"] < 1
    assert quality["ffn16"].positions == len(agree)
    assert quality["ffn32"].figures["token_agreement"] == 1.0
    assert quality["ffn32"].figures["kl_small_to_universal"] == 0.0


def test_engines_in_groups_say_the_same(bundle: Bundle, rows: ArraySamples, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(bundle, rows, "ffn16", "ffn32")
    monkeypatch.setattr(module, "_ENGINES_OPEN_AT_ONCE", 1)
    assert measured(bundle, rows, "ffn16", "ffn32") == whole


def test_progress_counts_the_batches_of_all_groups(
    bundle: Bundle, rows: ArraySamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ENGINES_OPEN_AT_ONCE", 1)
    (universal,), steps = engines(bundle, "ffn32"), list[tuple[int, int]]()
    list(measure(bundle, universal, engines(bundle, "ffn16", "ffn32"), rows, 1, lambda *step: steps.append(step)))
    assert steps == [(n, 16) for n in range(16)], "8 batches of 2 rows, twice"


def test_the_universal_engine_runs_once_a_batch(
    bundle: Bundle, rows: ArraySamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []
    original = module.runner_for

    def counting(bundle: Bundle, engine: EngineEntry, residency: Any, threads: int) -> Any:
        runner = original(bundle, engine, residency, threads)
        run = runner.run
        monkeypatch.setattr(runner, "run", lambda feeds: (runs.append(engine.submodel), run(feeds))[1])
        return runner

    monkeypatch.setattr(module, "runner_for", counting)
    measured(bundle, rows, "ffn16", "ffn32")
    assert (runs.count("ffn32"), runs.count("ffn16")) == (8, 8)


def test_without_an_output_to_compare_nothing_is_claimed(bundle: Bundle, rows: ArraySamples) -> None:
    outputs = tuple(replace(spec, dims=("batch",)) for spec in bundle.manifest.outputs)
    plain = replace(bundle, manifest=replace(bundle.manifest, outputs=outputs, text=None))
    assert measured(plain, rows, "ffn16") == {}
