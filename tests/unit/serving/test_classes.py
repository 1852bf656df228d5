"""Routes of text-embeddings-inference that classify and rerank, beside transformers on the same checkpoints."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from support.sentence_folders import save_tokenizer
from support.servers import Running, serving
from support.tiny_compile import board, save_tiniest
from support.tokenizer_files import WORDS
from tokenizers import Tokenizer, processors

QUERY, TEXTS = " ".join(WORDS[:3]), [" ".join(WORDS[n : n + 1 + n % 4]) for n in range(7)]


def saved(folder: Path, classes: int) -> Path:
    """Whose tokenizer joins pairs as BERT's does."""
    save_tiniest(folder, task="ForSequenceClassification", num_labels=classes)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]"))],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    save_tokenizer(folder)
    own = folder / "tokenizer_config.json"
    names = ["input_ids", "token_type_ids", "attention_mask"]
    own.write_text(json.dumps({**json.loads(own.read_text()), "model_input_names": names}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("classes")
    return {"three": saved(base / "three", 3), "reranker": saved(base / "reranker", 1)}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tiny_bundle: Path) -> Iterator[Running]:
    profile = board(buckets=["4x16"], budgets={"full": {}})
    bundles = [
        nestforge.compile(folder, profile=profile, output=folder.with_suffix(".bundle"), include="budgets")
        for folder in folders.values()
    ]
    with serving(*bundles, tiny_bundle) as running:
        yield running


def theirs(folder: Path, inputs: Any, **options: Any) -> Any:
    import transformers

    pipeline = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    return pipeline(inputs, **options)


def test_classes_of_texts_and_pairs(server: Running, folders: dict[str, Path]) -> None:
    pair = {"text": QUERY, "text_pair": TEXTS[3]}
    for asked, expected in (
        (QUERY, theirs(folders["three"], [QUERY], top_k=None)[0]),
        ([QUERY, TEXTS[3]], theirs(folders["three"], pair, top_k=None)),
        ([[text] for text in TEXTS], theirs(folders["three"], TEXTS, top_k=None)),
        ([[QUERY, TEXTS[3]], [QUERY]], [theirs(folders["three"], one, top_k=None) for one in (pair, {"text": QUERY})]),
    ):
        status, headers, found = server.ask("POST", "/predict", {"inputs": asked})
        assert (status, bool(headers["nestforge-submodel"])) == (200, True)
        for own, row in zip(
            *(each if isinstance(each[0], list) else [each] for each in (found, expected)), strict=True
        ):
            assert [one["label"] for one in own] == [one["label"] for one in row]
            assert [one["score"] for one in own] == pytest.approx([one["score"] for one in row], abs=1e-5)
    raw = server.ask("POST", "/predict", {"inputs": QUERY, "raw_scores": True})[2]
    logits = theirs(folders["three"], [QUERY], top_k=None, function_to_apply="none")[0]
    assert [one["score"] for one in raw] == pytest.approx([one["score"] for one in logits], abs=1e-5)


def test_texts_by_how_they_answer_a_query(server: Running, folders: dict[str, Path]) -> None:
    pairs = [{"text": QUERY, "text_pair": text} for text in TEXTS]
    scores = [one["score"] for one in theirs(folders["reranker"], pairs, function_to_apply="sigmoid")]
    asked = {"query": QUERY, "texts": TEXTS, "return_text": True}
    found = server.ask("POST", "/models/reranker/rerank", asked)[2]
    assert [one["index"] for one in found] == np.argsort(-np.array(scores), kind="stable").tolist()
    assert [one["score"] for one in found] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    assert [one["text"] for one in found] == [TEXTS[one["index"]] for one in found]
    long = {**asked, "texts": [" ".join(WORDS * 9)]}
    said = server.ask("POST", "/models/reranker/rerank", long)[2]["error"]
    assert 'the largest bucket takes 16; shorten it, pass `"truncate": true`' in said
    assert server.ask("POST", "/models/reranker/rerank", {**long, "truncate": True})[0] == 200


def test_without_a_route_a_model_does_what_it_can(server: Running) -> None:
    own = {"query": QUERY, "texts": TEXTS}
    for before, body, route in (("", {"inputs": QUERY}, "predict"), ("/models/reranker", own, "rerank")):
        expected = server.ask("POST", f"{before}/{route}", body)
        found = server.ask("POST", before or "/", body)
        assert (found[0], found[2]) == (200, expected[2])


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("tiny", {"embedding": {"pooling": "total"}}),
        ("reranker", {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}),
        (
            "three",
            {
                "classifier": {
                    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
                    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
                }
            },
        ),
    ],
)
def test_info_says_what_a_model_does(server: Running, model: str, kind: dict[str, Any]) -> None:
    assert server.ask("GET", f"/models/{model}/info")[2]["model_type"] == kind


@pytest.mark.parametrize(
    "own",
    [
        pytest.param({}, id="llama-index-0.6.0"),
        pytest.param({"raw_scores": False, "truncate": True, "truncation_direction": "Right"}, id="haystack-3.1.0"),
    ],
)
def test_requests_that_rerankers_clients_were_seen_to_send(server: Running, own: dict[str, Any]) -> None:
    status, _, found = server.ask("POST", "/models/reranker/rerank", {"query": QUERY, "texts": TEXTS, **own})
    assert status == 200, found
    assert sorted(one["index"] for one in found) == [*range(len(TEXTS))]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/models/tiny/predict", {"inputs": "a"}, "model tiny: expected an output of logits [batch, classes]"),
        ("/rerank", {"query": "a", "texts": ["a"]}, "model three: scores 3 classes; a model that reranks scores one"),
        ("/models/reranker/rerank", {"texts": ["a"]}, "query: expected a text, got None"),
        (
            "/predict",
            {"inputs": ["a", "b", "c"]},
            "inputs: expected a text, a list of one text or of a pair, or a list of",
        ),
        ("/predict", {"inputs": [["a"], "b"]}, "inputs: expected"),
    ],
)
def test_what_cannot_be_is_one_line(server: Running, path: str, body: Any, said: str) -> None:
    status, _, found = server.ask("POST", path, body)
    assert status == 422
    assert found["error"].startswith(said)
