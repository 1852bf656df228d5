from __future__ import annotations

from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.bucket import Bucket
from nestforge.integrations.text_model import TextModel
from support.exit_bundles import write_exits_bundle


def test_says_who_answers(sentence_bundle: Path) -> None:
    with TextModel(sentence_bundle, budget="half") as opened:
        assert repr(opened).startswith("TextModel(Bundle(")
        assert repr(opened).endswith(f", {opened.submodel})")


def test_a_bundle_without_a_tokenizer_is_refused_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(nestforge.ElasticModel, "close", lambda model: closed.append(model))
    path = write_exits_bundle(tmp_path / "b", [Bucket(1, 8)])
    with pytest.raises(nestforge.InputError) as error:
        TextModel(path)
    assert str(error.value) == f"bundle {path}: has no tokenizer, so it cannot be asked for texts"
    assert len(closed) == 1
