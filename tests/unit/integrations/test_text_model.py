from __future__ import annotations

from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.integrations.text_model import TextModel, listed
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a", "b"}, "inputs: expected a text or texts in an order, got a set, which has none; give a list"),
        (frozenset("a"), "inputs: expected a text or texts in an order, got a frozenset, which has none; give a list"),
        (np.array("a"), "inputs: expected a text or texts, got ndarray"),
        ({"a": 1}, "inputs: expected a text or texts, got dict"),
        (("a", b"b"), "text 1: expected text, got b'b'"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(given: Any, message: str) -> None:
    """The encoder and the classifier alike."""
    with pytest.raises(nestforge.InputError) as error:
        listed(given)
    assert str(error.value) == message
