"""Texts through a bundle, beside sentence-transformers itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.parity.receipt import as_receipt
from support.sentence_folders import HIDDEN, Layout
from support.tiny_compile import board

PROMPTS = {"prompts": {"query": "time budget ", "passage": "a "}, "default_prompt_name": "query"}


def test_a_bundles_receipt_is_of_texts_too(
    tmp_path: Path,
    edit_manifest: Callable[[Path, Callable[[dict[str, Any]], object]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokenizer, case, length, prompts that are not pooled, Dense, Normalize and a cut; then another default prompt,
    and the library missing."""
    folder = Layout(
        "all of it",
        lambda m: [m.Pooling(HIDDEN, include_prompt=False), m.Dense(HIDDEN, 12), m.Normalize()],
        config=PROMPTS,
        transformer={"max_seq_length": 12, "do_lower_case": True},
    ).write(tmp_path / "m")
    profile = board(buckets=["1..4x1..16"], budgets={"full": {}})
    pairs = ["1:4", "2:8"]
    bundle = nestforge.compile(folder, profile=profile, output=tmp_path / "b", include="levels", pairs=pairs)
    report = nestforge.check_parity(bundle, folder)
    assert report.is_right, report.line
    texts, one_layer, tokens = report.graphs[:3]
    assert texts.kind.startswith("bundle, texts; beside sentence-transformers 6.")
    assert texts.cases == ("texts 1 to 6", "texts 7 to 7", "texts 1 to 6, prompt passage")
    assert [match.name for match in texts.outputs] == ["sentence_embedding", "sentence_embedding in 8"]
    assert [match.name for match in one_layer.outputs] == ["sentence_embedding", "sentence_embedding in 4"]
    assert ("pooling_mask", "pooling_mask") in [(match.name, match.model) for match in tokens.inputs]
    assert "sentence-transformers" in json.loads(as_receipt(report))["versions"]
    of_compile = nestforge.open_bundle(bundle).manifest.texts
    assert [receipt.cases for receipt in of_compile] == [texts.cases, one_layer.cases]
    names = [[output.name for output in receipt.outputs] for receipt in of_compile]
    assert names == [[match.name for match in graph.outputs] for graph in (texts, one_layer)]

    edit_manifest(bundle, lambda data: data["text"].update(default_prompt="passage"))
    wrong = nestforge.check_parity(bundle, folder)
    assert [graph.is_right for graph in wrong.graphs] == [False, False, True, True]
    assert "first wrong: texts; it looks like another tokenizer, prompt or longest text" in wrong.line

    monkeypatch.setattr("nestforge.parity.texts.is_installed", lambda: False)
    without = nestforge.check_parity(bundle, folder)
    assert len(without.graphs) == 2
    lack = "needs the folder of sentence-transformers, and that library"
    assert without.not_checked == (f"{texts.export}: {lack}", f"{one_layer.export}: {lack}")
