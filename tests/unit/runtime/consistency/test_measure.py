from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.manifest import Quality
from nestforge.bundle.open_bundle import Bundle
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.consistency import measure as module
from nestforge.runtime.consistency.measure import consistency, measure
from nestforge.runtime.consistency.samples import ArraySamples
from nestforge.runtime.consistency.tallies import cosines, recalls_at

BUCKET = Bucket(2, 16)


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


WORDS = ("a", "nest", "of", "models")
LINES = [f"{a} {b} {c} {d}" for a in WORDS for b in WORDS for c in WORDS for d in WORDS]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join([*LINES[:40], "", LINES[0], "of " * 30]))
    return path


def without(bundle: Bundle, *engines: str) -> Bundle:
    kept = tuple(engine for engine in bundle.manifest.engines if engine.id not in engines)
    return replace(bundle, manifest=replace(bundle.manifest, engines=kept))


def test_every_submodel_on_the_users_texts(bundle: Bundle, texts: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    found = consistency(bundle, text=texts, threads=1, progress=lambda *step: steps.append(step))
    assert (found.universal, found.bucket, found.outputs) == ("ffn32", Bucket(2, 16), {"embedding": "total"})
    assert (found.samples, found.given, found.truncated, found.positions) == (41, 41, 1, None)
    assert [(row.submodel, row.labels) for row in found.submodels] == [("ffn16", ("S",)), ("ffn32", ("XL",))]
    assert found.submodels[0].figures["mean_cosine"] < 0.999
    assert found.submodels[1].figures == {"mean_cosine": pytest.approx(1.0), "recall_at_10": 1.0}
    assert (steps[0], steps[-1]) == (("compare", 0, 1), ("compare", 1, 1))


def test_only_the_submodels_requested(bundle: Bundle, texts: Path) -> None:
    found = consistency(bundle, text=texts, submodels=["S", "ffn16"], threads=1)
    assert [row.submodel for row in found.submodels] == ["ffn16"]
    with pytest.raises(SelectionError, match=r"no submodel 'M' in this bundle; it has ffn16 \(S\), ffn32 \(XL\)"):
        consistency(bundle, text=texts, submodels=["M"])


def test_rows_of_arrays_say_what_texts_say(bundle: Bundle, texts: Path, tmp_path: Path) -> None:
    manifest = bundle.manifest
    encoder = module.TextEncoder(bundle.file(manifest.text.file), manifest.text, manifest.inputs)
    np.savez(tmp_path / "rows.npz", **encoder.encode(LINES[:40], 16).feeds)
    (tmp_path / "same.txt").write_text("\n".join(LINES[:40]))
    rows = consistency(bundle, data=tmp_path / "rows.npz", threads=1)
    lines = consistency(bundle, text=tmp_path / "same.txt", threads=1)
    assert (rows.samples, rows.truncated) == (40, 0)
    for one, other in zip(rows.submodels, lines.submodels, strict=True):
        assert one.figures["mean_cosine"] == pytest.approx(other.figures["mean_cosine"])


def test_of_many_samples_some_are_used(bundle: Bundle, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SAMPLES", 25)
    found = consistency(bundle, text=texts, threads=1)
    assert (found.samples, found.given) == (25, 41)
    texts.write_text("\n".join(reversed(texts.read_text().splitlines())))
    assert consistency(bundle, text=texts, threads=1) == found, "in whatever order they stand"


def test_the_bucket_is_one_that_all_have(bundle: Bundle, texts: Path) -> None:
    assert consistency(without(bundle, "ffn16@b2-s16"), text=texts, threads=1).bucket == Bucket(1, 8)
    only_universal = without(bundle, "ffn16@b2-s16")
    assert consistency(only_universal, text=texts, submodels=["XL"], threads=1).bucket == Bucket(2, 16)
    with pytest.raises(SelectionError, match="no bucket has engines of all of ffn16, ffn32"):
        consistency(without(bundle, "ffn16@b2-s16", "ffn32@b1-s8"), text=texts)


def test_what_a_bundle_cannot_be_asked(bundle: Bundle, texts: Path) -> None:
    with pytest.raises(SelectionError, match="has no engine of the universal model, with which submodels are compared"):
        consistency(without(bundle, "ffn32@b1-s8", "ffn32@b2-s16"), text=texts)
    mute = replace(bundle, manifest=replace(bundle.manifest, text=None))
    with pytest.raises(InputError, match="has no tokenizer; pass arrays as"):
        consistency(mute, text=texts)
    outputs = tuple(replace(spec, dims=("batch",)) for spec in bundle.manifest.outputs)
    scores = replace(bundle, manifest=replace(bundle.manifest, outputs=outputs, text=None))
    with pytest.raises(SelectionError, match="no output of this model is a vector or logits"):
        consistency(scores, text=texts)
    with pytest.raises(InputError, match="text and data: expected exactly one of them"):
        consistency(bundle)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("\n".join(LINES[:19]), "19 different texts, one per line; expected at least 20"),
        ("a\n" * 100, "1 different texts, one per line; expected at least 20"),
        (None, "expected a UTF-8 text file with one text per line"),
    ],
)
def test_texts_that_are_too_few_or_none(bundle: Bundle, tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError) as refusal:
        consistency(bundle, text=path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert problem in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_too_few_different_rows(bundle: Bundle, tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", input_ids=np.ones((50, 4), np.int64), attention_mask=np.ones((50, 4), np.int64))
    with pytest.raises(InputError, match="1 different rows; expected at least 20"):
        consistency(bundle, data=tmp_path / "r.npz")


def test_the_precision_of_what_all_is_compared_with(bundle: Bundle, texts: Path) -> None:
    assert consistency(bundle, text=texts, threads=1).universal_precision == "fp32"
    engines = tuple(replace(engine, precision="int8") for engine in bundle.manifest.engines)
    narrow = replace(bundle, manifest=replace(bundle.manifest, engines=engines))
    assert consistency(narrow, text=texts, threads=1).universal_precision == "int8"
