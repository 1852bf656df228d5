from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.consistency import report as module
from nestforge.runtime.consistency.report import check_consistency

WORDS = ("a", "nest", "of", "models")
LINES = [f"{a} {b} {c} {d}" for a in WORDS for b in WORDS for c in WORDS for d in WORDS]


@pytest.fixture
def bundle(tiny_bundle: Path) -> Bundle:
    return open_bundle(tiny_bundle)


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
    found = check_consistency(bundle, text=texts, threads=1, progress=lambda *step: steps.append(step))
    assert (found.universal, found.bucket, found.outputs) == ("ffn32", Bucket(2, 16), {"embedding": "total"})
    assert (found.samples, found.given, found.truncated, found.positions) == (41, 41, 1, None)
    assert [(row.submodel, row.labels) for row in found.submodels] == [("ffn16", ("S",)), ("ffn32", ("XL",))]
    assert found.submodels[0].figures["mean_cosine"] < 0.999
    assert found.submodels[1].figures == {"mean_cosine": pytest.approx(1.0), "recall_at_10": 1.0}
    assert (steps[0], steps[-1]) == (("compare", 0, 1), ("compare", 1, 1))


def test_only_the_submodels_asked_for(bundle: Bundle, texts: Path) -> None:
    found = check_consistency(bundle, text=texts, submodels=["S", "ffn16"], threads=1)
    assert [row.submodel for row in found.submodels] == ["ffn16"]
    with pytest.raises(SelectionError, match=r"no submodel 'M' in this bundle; it has ffn16 \(S\), ffn32 \(XL\)"):
        check_consistency(bundle, text=texts, submodels=["M"])


def test_rows_of_arrays_say_what_texts_say(bundle: Bundle, texts: Path, tmp_path: Path) -> None:
    manifest = bundle.manifest
    assert manifest.text is not None
    encoder = module.TextEncoder(bundle.file(manifest.text.file), manifest.text, manifest.inputs)
    np.savez(tmp_path / "rows.npz", **encoder.encode(LINES[:40], 16).feeds)
    (tmp_path / "same.txt").write_text("\n".join(LINES[:40]))
    rows = check_consistency(bundle, data=tmp_path / "rows.npz", threads=1)
    lines = check_consistency(bundle, text=tmp_path / "same.txt", threads=1)
    assert (rows.samples, rows.truncated) == (40, 0)
    for one, other in zip(rows.submodels, lines.submodels, strict=True):
        assert one.figures["mean_cosine"] == pytest.approx(other.figures["mean_cosine"])


def test_of_many_samples_some_are_used(bundle: Bundle, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SAMPLES", 25)
    found = check_consistency(bundle, text=texts, threads=1)
    assert (found.samples, found.given) == (25, 41)
    texts.write_text("\n".join(reversed(texts.read_text().splitlines())))
    assert check_consistency(bundle, text=texts, threads=1) == found, "in whatever order they stand"


def test_the_bucket_is_one_that_all_have(bundle: Bundle, texts: Path) -> None:
    assert check_consistency(without(bundle, "ffn16@b2-s16"), text=texts, threads=1).bucket == Bucket(1, 8)
    only_universal = without(bundle, "ffn16@b2-s16")
    assert check_consistency(only_universal, text=texts, submodels=["XL"], threads=1).bucket == Bucket(2, 16)
    with pytest.raises(SelectionError, match="no bucket has engines of all of ffn16, ffn32"):
        check_consistency(without(bundle, "ffn16@b2-s16", "ffn32@b1-s8"), text=texts)


def test_what_a_bundle_cannot_be_asked(bundle: Bundle, texts: Path) -> None:
    with pytest.raises(SelectionError, match="has no engine of the universal model, with which submodels are compared"):
        check_consistency(without(bundle, "ffn32@b1-s8", "ffn32@b2-s16"), text=texts)
    mute = replace(bundle, manifest=replace(bundle.manifest, text=None))
    with pytest.raises(InputError, match="has no tokenizer; pass arrays as"):
        check_consistency(mute, text=texts)
    outputs = tuple(replace(spec, dims=("batch",)) for spec in bundle.manifest.outputs)
    scores = replace(bundle, manifest=replace(bundle.manifest, outputs=outputs, text=None))
    with pytest.raises(SelectionError, match="no output of this model is a vector or logits"):
        check_consistency(scores, text=texts)
    with pytest.raises(InputError, match="text and data: expected exactly one of them"):
        check_consistency(bundle)


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
        check_consistency(bundle, text=path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert problem in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_too_few_different_rows(bundle: Bundle, tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", input_ids=np.ones((50, 4), np.int64), attention_mask=np.ones((50, 4), np.int64))
    with pytest.raises(InputError, match="1 different rows; expected at least 20"):
        check_consistency(bundle, data=tmp_path / "r.npz")


def test_the_precision_of_what_all_is_compared_with(bundle: Bundle, texts: Path) -> None:
    assert check_consistency(bundle, text=texts, threads=1).universal_precision == "fp32"
    engines = tuple(replace(engine, precision="int8") for engine in bundle.manifest.engines)
    narrow = replace(bundle, manifest=replace(bundle.manifest, engines=engines))
    assert check_consistency(narrow, text=texts, threads=1).universal_precision == "int8"
