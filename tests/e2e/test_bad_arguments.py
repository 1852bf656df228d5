"""Arguments of a compile that do not fit the model: one clear line that says where and what, and nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.engines import templates as templates_module
from nestforge.errors import BundleCorruptError, CheckpointError, ExportError, InputError, NestforgeError, PlanError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.refused_compile import Case
from support.tiny_compile import save_tiniest, template_of
from support.tiny_models import word_tokenizer


@pytest.fixture(scope="module")
def templates(model: Path) -> dict[Bucket, Any]:
    """Traces are not what is wrong here, so they are made once."""
    universal = load_universal(open_source(model))
    return {bucket: template_of(universal, bucket) for bucket in (Bucket(2, 8), Bucket(1, 1))}


ARGUMENTS: dict[str, tuple[Callable[[Case], object], type[NestforgeError], str]] = {
    "levels of an unknown kind": (
        lambda c: c.arguments.update(levels={"fnn": [0.5, 1.0]}),
        PlanError,
        r"levels: this model has no axis kind 'fnn'; did you mean 'ffn'\?",
    ),
    "levels that fall": (
        lambda c: c.arguments.update(levels={"ffn": [1.0, 0.5]}),
        PlanError,
        r"levels: ffn: expected fractions that increase from above 0 to 1, got \[1, 0.5\]",
    ),
    "bucket too long": (
        lambda c: c.arguments.update(buckets=[Bucket(1, 41)]),
        ExportError,
        r"bucket b1-s41: .* takes at most 40 tokens",
    ),
    "bucket too short for text": (
        lambda c: c.arguments.update(buckets=[Bucket(1, 1)]),
        InputError,
        r"text: the tokenizer adds 2 tokens to each, and the largest bucket takes 1; compile with a larger bucket",
    ),
    "submodel off the axes": (
        lambda c: c.arguments.update(submodels=["ffn64-heads2"]),
        PlanError,
        r"axis layers.0.ffn: expected 1..32, got 64",
    ),
    "submodel of another depth": (
        lambda c: c.arguments.update(submodels=["ffn8x3"]),
        PlanError,
        r"axis kind ffn: expected 2 values, one per layer, got more",
    ),
    "submodel by a label that is none": (
        lambda c: c.arguments.update(submodels=["XXL"]),
        PlanError,
        r"submodel 'XXL': cannot read 'XXL'; expected ids like ffn32-heads2, or labels: ",
    ),
    "unknown include": (
        lambda c: c.arguments.update(include="everything"),
        InputError,
        r"include: expected 'budgets' or 'levels' or 'ladder', got str 'everything'",
    ),
    "damaged tokenizer": (
        lambda c: (c.model / "tokenizer.json").write_text('{"version":\n'),
        BundleCorruptError,
        r"model/tokenizer.json: not a tokenizer file",
    ),
    "text file missing": (
        lambda c: c.text(None),
        CheckpointError,
        r"text.txt: cannot be read \(No such file or directory\); expected a UTF-8 text file",
    ),
    "text file too small": (
        lambda c: c.text(b"one\ntwo\n"),
        CheckpointError,
        r"text.txt: 2 different texts; expected at least 200, one per line",
    ),
    "text file binary": (
        lambda c: c.text(bytes(range(256)) * 10),
        CheckpointError,
        r"text.txt: line 2: not UTF-8; expected a UTF-8 text file with one text per line",
    ),
}


@pytest.mark.parametrize(("damage", "error", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments(
    case: Case,
    templates: dict[Bucket, Any],
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Case], object],
    error: type[NestforgeError],
    message: str,
) -> None:
    monkeypatch.setattr(templates_module, "traced_template", lambda _u, _m, _i, bucket, *_: templates[bucket])
    damage(case)
    refusal = case.refused()
    assert type(refusal) is error
    assert re.search(message, str(refusal)), str(refusal)


def test_text_without_tokenizer(case: Case, text: Path) -> None:
    (case.model / "tokenizer.json").unlink()
    case.arguments["text"] = text
    assert "no tokenizer.json, so the text file cannot be read by this model" in str(case.refused())


def test_a_tokenizer_that_knows_more_than_the_model(case: Case, tmp_path: Path, text: Path) -> None:
    case.model = save_tiniest(tmp_path / "inputs" / "small", vocab_size=10)
    word_tokenizer(64).save(str(case.model / "tokenizer.json"))
    case.arguments["text"] = text
    assert re.search(r"text \d+: the tokenizer gives \d+ for input_ids, which takes 0..9", str(case.refused()))
