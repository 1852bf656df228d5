from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.runtime.answer import Answer, Timings
from nestforge.tools.best_answers import Best, best_answers


def answer(logits: Any) -> Answer:
    array = np.array(logits, np.float32)
    return Answer({"logits": array}, "s", "e", Bucket(1, 1), "shared", "", None, (), Timings(0, 0, 0, 0))


@pytest.fixture
def bundle(compiled: Any) -> Bundle:
    return open_bundle(compiled.bundle)


def with_output(bundle: Bundle, spec: TensorSpec) -> Bundle:
    return replace(bundle, manifest=replace(bundle.manifest, outputs=(spec,)))


def test_the_best_classes_of_each_row(bundle: Bundle) -> None:
    found = best_answers(
        with_output(bundle, TensorSpec("logits", "float32", ("batch", 4))),
        answer([[1, 3, 2, 3], [0, -1, 5, 4]]),
        None,
    )
    assert found == ("class", [[Best(1, 3), Best(3, 3), Best(2, 2)], [Best(2, 5), Best(3, 4), Best(0, 0)]])
    assert str(Best(1, 3.14159)) == "1 3.14"


def test_the_best_tokens_after_each_texts_last(bundle: Bundle) -> None:
    spec = TensorSpec("logits", "float32", ("batch", "sequence", 64), role="next_tokens")
    logits = np.zeros((2, 3, 64))
    logits[0, 1, 4:7], logits[0, 2, 9], logits[1, 2, 7] = [3, 2, 1], 9, 8
    bundle = with_output(bundle, spec)
    what, rows = best_answers(bundle, answer(logits), [2, 5]) or ("", [])
    assert what == "next token"
    assert [[(best.id, best.token) for best in row] for row in rows] == [
        [(4, "the"), (5, "a"), (6, "quick")],
        [(7, "brown"), (0, "[PAD]"), (1, "[UNK]")],
    ]
    assert str(rows[0][0]) == "'the' 3.00"
    bare = replace(bundle, manifest=replace(bundle.manifest, text=None))
    assert [row[0] for row in (best_answers(bare, answer(logits), None) or ("", []))[1]] == [Best(9, 9), Best(7, 8)]


def test_an_encoder_has_none(bundle: Bundle) -> None:
    assert best_answers(bundle, answer([[1]]), None) is None
