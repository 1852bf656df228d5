"""The receipt of texts that a compile leaves in a bundle, beside sentence-transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.compiler.parity.prove_texts import prove_texts
from nestforge.errors import ParityError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.summary import detail_tables
from support.sentence_folders import HIDDEN, Layout, classes
from support.tiny_compile import board


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Layout(
        "two-dimensional",
        lambda m: [m.Pooling(HIDDEN), m.LayerNorm(HIDDEN), m.Dense(HIDDEN, 12), m.Normalize()],
        config={"prompts": {"query": "time budget ", "passage": "a "}, "default_prompt_name": "query"},
    ).write(tmp_path_factory.mktemp("texts") / "m")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    return nestforge.compile(
        folder,
        board(buckets=["1..8x1..16"], budgets={"full": {}}),
        output=folder.with_name("b"),
        exits=(1,),
        submodels=["depth1", "ffn16", "depth2"],
        dimensions=(8, 4),
    )


def test_every_depth_and_cut_is_that_of_the_library(folder: Path, bundle: Path) -> None:
    manifest = nestforge.open_bundle(bundle).manifest
    assert [receipt.submodel for receipt in manifest.texts] == ["depth2-ffn32-heads2", "depth1-ffn32-heads2"]
    for receipt in manifest.texts:
        assert receipt.library.startswith("sentence-transformers 6.")
        assert receipt.stages == ("tokenizer", "prompts", "layers", "Pooling", "LayerNorm", "Dense", "Normalize")
        assert receipt.cases == ("texts 1 to 6", "texts 7 to 7", "texts 1 to 6, prompt passage")
        names = [output.name for output in receipt.outputs]
        assert names == ["sentence_embedding", "sentence_embedding in 8", "sentence_embedding in 4"]
        assert all(output.max_abs < 1e-5 and output.min_cosine > 1 - 1e-6 for output in receipt.outputs)
    shown = detail_tables(manifest)["Texts"]
    assert len(shown.rows) == 6
    assert "## Texts" in (bundle / "report.md").read_text()
    report = nestforge.verify(bundle, against=folder)
    assert [v.engine for v in report.engines if "texts" in v.engine] == [
        f"{receipt.submodel}, texts" for receipt in manifest.texts
    ]
    assert report


def test_another_prompt_and_another_module_are_found(
    folder: Path,
    bundle: Path,
    edit_manifest: Callable[[Path, Callable[[dict[str, Any]], object]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    universal = load_universal(open_source(folder, (1,), dimensions=(8, 4)))
    opened = nestforge.open_bundle(bundle)
    with monkeypatch.context() as patch:
        patch.setattr(classes().Normalize, "forward", lambda _, features: features)
        with pytest.raises(
            ParityError, match=r"^texts, depth2-ffn32-heads2: beside sentence-transformers 6\S+, output sentence_emb"
        ):
            prove_texts(opened, universal)
    with monkeypatch.context() as patch:
        patch.setattr("nestforge.exporters.sentence_transformers.library.find_spec", lambda _: None)
        assert prove_texts(opened, universal) == ()
        verdicts = [v.problem for v in nestforge.verify(bundle, against=folder).engines if "texts" in v.engine]
        assert [problem is not None and "needs sentence-transformers" in problem for problem in verdicts] == [True] * 2
    edit_manifest(bundle, lambda data: data["text"].update(default_prompt="passage"))
    with pytest.raises(ParityError, match=r"^texts, depth2-ffn32-heads2: beside"):
        prove_texts(nestforge.open_bundle(bundle), universal)
