"""Texts that are classified, and texts as rows of a model."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.integrations import TextClassifier
from nestforge.integrations.text_model import TextModel, listed
from support.cost_eff_models import save_tiny as save_exits
from support.exit_bundles import write_exits_bundle
from support.sentence_folders import save_tokenizer
from support.tiny_compile import board, save_tiniest
from support.tokenizer_files import WORDS, word_tokenizer

LABELS = {0: "sad", 1: "calm", 2: "glad"}
TEXTS = [" ".join(WORDS[(n * 7 + i) % len(WORDS)] for i in range(1 + n * 5 % 9)) for n in range(11)]
TASK = "ForSequenceClassification"


def compiled(folder: Path, *buckets: str) -> Path:
    profile = board(buckets=list(buckets), budgets={"full": {}, "half": {"flops": "70 %"}})
    return nestforge.compile(folder, profile=profile, output=folder.with_suffix(".bundle"), include="budgets")


def pipeline_of(folder: Path, **options: Any) -> Any:
    import transformers

    return transformers.pipeline("text-classification", model=str(folder), device="cpu", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = {"id2label": LABELS, "label2id": {label: number for number, label in LABELS.items()}}
    made = save_tiniest(tmp_path_factory.mktemp("classes") / "m", task=TASK, **names)
    save_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    return compiled(folder, "2x8", "3x16")


@pytest.fixture(scope="module")
def classify(folder: Path, bundle: Path) -> Iterator[TextClassifier]:
    labels = json.loads((folder / "config.json").read_text())["id2label"]
    with TextClassifier(bundle, labels=labels) as opened:
        yield opened


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return pipeline_of(folder)


def same(found: Any, expected: Any) -> None:
    """Equal labels in equal order, and scores to 1e-5."""
    assert type(found) is type(expected)
    if isinstance(found, list):
        assert len(found) == len(expected)
        for mine, their in zip(found, expected, strict=True):
            same(mine, their)
    else:
        assert found.keys() == expected.keys() == {"label", "score"}
        assert found["label"] == expected["label"]
        assert type(found["score"]) is float
        assert found["score"] == pytest.approx(expected["score"], abs=1e-5)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"top_k": 1},
        {"top_k": 2},
        {"top_k": 9},
        {"top_k": None},
        {"function_to_apply": "sigmoid", "top_k": None},
        {"function_to_apply": "none", "top_k": None},
        {"function_to_apply": "softmax", "batch_size": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("given", [TEXTS[1], TEXTS[:1], TEXTS], ids=["text", "one", "several"])
def test_answers_as_the_pipeline_does(classify: TextClassifier, theirs: Any, given: Any, asked: dict[str, Any]) -> None:
    same(classify(given, **asked), theirs(given, **asked))


def test_no_texts_have_no_answers(classify: TextClassifier) -> None:
    assert classify([]) == classify([], top_k=None) == []  # where the pipeline fails


def test_labels_are_given_or_numbered(bundle: Path) -> None:
    with nestforge.load(bundle) as model:
        assert TextClassifier(model).labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        for labels in (LABELS, ["sad", "calm", "glad"], {"2": "glad", "0": "sad", "1": "calm"}):
            assert TextClassifier(model, labels=labels).labels == ("sad", "calm", "glad")
        for wrong in (["a", "b"], "sad", {0: "a", 1: "b", 3: "c"}, {0: "a", 1: "b"}, ["a", "b", 3]):
            with pytest.raises(nestforge.InputError) as error:
                TextClassifier(model, labels=wrong)
            assert str(error.value) == f"labels: expected the names of 3 classes, got {wrong!r}"


def test_longer_texts_are_refused_or_cut(
    classify: TextClassifier, theirs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [TEXTS[0], " ".join(WORDS)]
    with pytest.raises(
        nestforge.InputError, match=r"^row 1: \d+ steps, the largest bucket takes 16; shorten it, trunc"
    ):
        classify(texts)
    with caplog.at_level(logging.WARNING, "nestforge"):
        same(classify(texts, truncation=True), theirs(texts, truncation=True, max_length=16))
    assert caplog.messages[-1] == (
        f"1 of 2 texts were cut to 16 tokens, the most that submodel {classify.submodel} takes here"
    )
    assert classify.truncated == 1


def test_a_budget_chooses_who_answers(bundle: Path) -> None:
    with nestforge.load(bundle) as model:
        small = TextClassifier(model, budget="half")
        assert small.submodel != TextClassifier(model).submodel
        (best,) = small("a dog", function_to_apply="none")
        assert best["score"] == np.max(model("a dog", budget="half")["logits"])


def test_rows_leave_a_model_with_exits_as_it_is_asked_to(tmp_path: Path) -> None:
    folder = save_exits(tmp_path / "m")
    word_tokenizer(64).save(str(folder / "tokenizer.json"))
    profile = board(buckets=["4x8"], budgets={"full": {}})
    with nestforge.load(nestforge.compile(folder, profile, tmp_path / "b", levels={"depth": (1.0,)})) as model:
        scores = {}
        for exits in ("off", 9.0):  # nats: more than any entropy, so every row leaves at once
            found = TextClassifier(model, exits=exits)(TEXTS[:2], top_k=None, function_to_apply="none")
            answer = model(TEXTS[:2], exits=exits)
            assert (answer.exits is None) == (exits == "off")
            scores[exits] = [sorted(each["score"] for each in row) for row in found]
            np.testing.assert_allclose(scores[exits], np.sort(answer["logits"], axis=1), rtol=1e-4, atol=1e-5)
        assert scores["off"] != scores[9.0]


@pytest.mark.parametrize("problem", ["regression", None])
def test_one_class_is_a_score(tmp_path: Path, problem: str | None) -> None:
    folder = save_tiniest(tmp_path / "m", task=TASK, num_labels=1, **({"problem_type": problem} if problem else {}))
    save_tokenizer(folder)
    with TextClassifier(compiled(folder, "3x16"), function_to_apply="none" if problem else None) as classify:
        same(classify(TEXTS), pipeline_of(folder)(TEXTS))


def test_no_logit_is_too_large_for_a_score(classify: TextClassifier) -> None:
    from nestforge.integrations.text_classifier import SCORES

    logits = np.array([[-1000.0, 0.0, 1000.0]], np.float32)
    np.testing.assert_array_equal(SCORES["sigmoid"](logits), [[0.0, 0.5, 1.0]])
    np.testing.assert_array_equal(SCORES["softmax"](logits), [[0.0, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("given", "asked", "message"),
    [
        ({"text": "a", "text_pair": "b"}, {}, "inputs: expected a text or texts, got dict"),
        ([{"text": "a"}], {}, "text 0: expected text, got {'text': 'a'}"),
        ("a", {"top_k": 0}, "top_k: expected a whole number of at least 1, or None for all, got 0"),
        ("a", {"function_to_apply": "sofmax"}, "function_to_apply 'sofmax'; did you mean 'softmax'?"),
        ("a", {"batch_size": -1}, "batch_size: expected a whole number of at least 1, got -1"),
    ],
)
def test_refuses_in_one_line(classify: TextClassifier, given: Any, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(nestforge.InputError) as error:
        classify(given, **asked)
    assert str(error.value) == message


def test_a_bundle_that_does_not_classify_is_refused(sentence_bundle: Path) -> None:
    with pytest.raises(nestforge.InputError) as error:
        TextClassifier(sentence_bundle)
    assert str(error.value).startswith(
        f"bundle {sentence_bundle}: expected an output of logits [batch, classes]; it has "
    )


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
