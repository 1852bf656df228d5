"""The encoder against sentence-transformers itself, on one folder: vectors, prompts, truncation and its evaluators."""

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.integrations import SentenceEncoder
from nestforge.integrations.sentence_encoder import absent
from support.sentence_folders import HIDDEN
from support.tokenizer_files import WORDS

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
TEXTS = [" ".join(WORDS[(n * 3 + i) % len(WORDS)] for i in range(1 + n * 5 % 9)) for n in range(17)]
LONG = " ".join(WORDS)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"batch_size": 1},
        {"batch_size": 2},
        {"normalize_embeddings": True},
        {"truncate_dim": 5, "normalize_embeddings": True},
        {"prompt": "dog "},
        {"prompt": ""},
        {"prompt_name": "query"},
        {"prompt_name": "document"},
        {"show_progress_bar": True},
        {"precision": None, "device": "cpu"},
        {"precision": "float32", "device": torch.device("cpu")},
        {"task": "query"},
    ],
    ids=str,
)
def test_vectors_are_those_of_the_library(encoder: SentenceEncoder, theirs: Any, asked: dict[str, Any]) -> None:
    found, expected = encoder.encode(TEXTS, **asked), theirs.encode(TEXTS, **asked)
    assert (found.dtype, found.shape) == (np.float32, expected.shape)
    np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.parametrize("kind", ["encode_query", "encode_document"])
@pytest.mark.parametrize("asked", [{}, {"prompt": "dog "}, {"prompt_name": "passage", "batch_size": 4}], ids=str)
def test_queries_and_documents_have_their_prompts(
    encoder: SentenceEncoder, theirs: Any, kind: str, asked: dict[str, Any]
) -> None:
    np.testing.assert_allclose(getattr(encoder, kind)(TEXTS, **asked), getattr(theirs, kind)(TEXTS, **asked), **CLOSE)


def test_what_is_returned_has_the_librarys_type(encoder: SentenceEncoder, theirs: Any) -> None:
    for asked in ({}, {"convert_to_tensor": True}, {"convert_to_numpy": False}):
        for given in (TEXTS[0], TEXTS[:3], tuple(TEXTS[:3]), np.array(TEXTS[:3]), iter(TEXTS[:3])):
            mine = encoder.encode(given, **asked)
            their = theirs.encode(TEXTS[0] if isinstance(given, str) else TEXTS[:3], **asked)
            assert type(mine) is type(their)
            assert np.shape(mine) == np.shape(their)
            if isinstance(mine, list):
                assert {type(vector) for vector in mine} == {torch.Tensor}
    assert encoder.encode([]).shape == (0, HIDDEN)
    assert encoder.encode([], convert_to_numpy=False) == []
    np.testing.assert_array_equal(encoder.encode(sentences=TEXTS), encoder.encode(TEXTS))


def test_a_text_has_one_vector_whatever_is_beside_it(encoder: SentenceEncoder) -> None:
    together = encoder.encode([*TEXTS, LONG])
    for text, vector in zip(TEXTS, together, strict=False):
        np.testing.assert_allclose(encoder.encode(text), vector, **CLOSE)


def test_threads_get_their_own_vectors_and_no_cut_is_lost(sentence_bundle: Path) -> None:
    with SentenceEncoder(sentence_bundle) as encoder, ThreadPoolExecutor(4) as threads:
        lists = [[*TEXTS[n:], LONG] for n in range(8)]
        expected = [encoder.encode(texts) for texts in lists]
        alone = encoder.truncated
        for mine, its in zip(threads.map(encoder.encode, lists), expected, strict=True):
            np.testing.assert_array_equal(mine, its)
        assert encoder.truncated == 2 * alone


def test_engines_run_in_full_batches_of_like_length(encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    call = type(encoder.model).__call__

    def counted(self: Any, texts: Any, **options: Any) -> Any:
        asked.append(len(texts))
        return call(self, texts, **options)

    monkeypatch.setattr(type(encoder.model), "__call__", counted)
    short, long = ["a"] * 5, ["a dog model engine run of to"] * 7  # 4 and 10 tokens, the prompt included
    encoder.encode([short[0], *long, *short[1:]])
    assert asked == [3, 3, 1, 2, 2, 1]


def test_longer_texts_are_cut_as_the_library_does_and_counted(
    sentence_bundle: Path, theirs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with SentenceEncoder(sentence_bundle) as encoder:
        assert encoder.max_seq_length == theirs.max_seq_length == 12
        texts = [*TEXTS[:4], LONG, LONG + " fox"]
        with caplog.at_level(logging.WARNING, "nestforge"):
            np.testing.assert_allclose(encoder.encode(texts, prompt=""), theirs.encode(texts, prompt=""), **CLOSE)
        (line,) = (record.getMessage() for record in caplog.records if record.name == "nestforge")
        assert line == f"2 of 6 texts were cut to 12 tokens, the most that submodel {encoder.submodel} takes here"
        encoder.encode(LONG)
        assert encoder.truncated == 3


def test_a_budget_and_a_submodel_choose_who_answers(sentence_bundle: Path) -> None:
    with nestforge.load(sentence_bundle) as model:
        budgets = {budget.name: budget.submodel for budget in model.bundle.manifest.budgets}
        assert budgets["full"] != budgets["half"]
        assert SentenceEncoder(model).submodel == budgets["full"]
        for encoder in (SentenceEncoder(model, budget="half"), SentenceEncoder(model, submodel=budgets["half"])):
            assert encoder.submodel == budgets["half"]
            np.testing.assert_array_equal(
                encoder.encode("a dog"), model("a dog", budget="half")["sentence_embedding"][0]
            )
        with SentenceEncoder(model) as whole:
            pass
        assert np.any(whole.encode("a dog") != encoder.encode("a dog")), "a model of the caller's stays open"
        with pytest.raises(nestforge.SelectionError, match="expected a budget, or a submodel"):
            SentenceEncoder(model, budget="half", submodel=budgets["full"])
        with pytest.raises(nestforge.SelectionError, match="no budget 'tiny'"):
            SentenceEncoder(model, budget="tiny")


def test_a_bundle_that_was_opened_here_is_closed(sentence_bundle: Path) -> None:
    with SentenceEncoder(sentence_bundle) as encoder:
        assert encoder.encode("a").shape == (HIDDEN,)
    with pytest.raises(nestforge.BundleError, match="closed"):
        encoder.encode("a")


def test_progress_is_drawn_on_stderr(encoder: SentenceEncoder, capfd: pytest.CaptureFixture[str]) -> None:
    encoder.encode(TEXTS)
    encoder.encode(TEXTS, show_progress_bar=False)
    assert capfd.readouterr() == ("", "")
    encoder.encode(TEXTS, show_progress_bar=True)
    found = capfd.readouterr()
    assert found.out == ""
    assert "100%" in found.err
    logging.getLogger("nestforge").setLevel(logging.INFO)
    try:
        encoder.encode(TEXTS)
    finally:
        logging.getLogger("nestforge").setLevel(logging.NOTSET)
    assert "100%" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities_are_the_librarys(sentence_bundle: Path, theirs: Any, name: Any) -> None:
    with SentenceEncoder(sentence_bundle, similarity_fn_name=name) as encoder:
        vectors = encoder.encode(TEXTS)
        theirs.similarity_fn_name = name
        for kind in ("similarity", "similarity_pairwise"):
            found = getattr(encoder, kind)(vectors, vectors[::-1].copy())
            assert torch.equal(found, getattr(theirs, kind)(vectors, vectors[::-1].copy()))
        theirs.similarity_fn_name = "cosine"


def evaluators() -> list[Any]:
    from sentence_transformers.sentence_transformer import evaluation as e

    pairs, labels = list(zip(TEXTS[:8], TEXTS[8:16], strict=True)), [n % 5 / 4 for n in range(8)]
    first, second = (list(side) for side in zip(*pairs, strict=True))
    corpus = {f"d{n}": text for n, text in enumerate(TEXTS)}
    queries = {f"q{n}": f"{text} fox" for n, text in enumerate(TEXTS[:5])}
    relevant = {f"q{n}": {f"d{n}", f"d{n + 7}"} for n in range(5)}
    depth: dict[str, Any] = {f"{name}_at_k": [1, 3] for name in ("mrr", "ndcg", "accuracy", "precision_recall", "map")}
    return [
        e.EmbeddingSimilarityEvaluator(first, second, labels, name="pairs"),
        e.EmbeddingSimilarityEvaluator(first, second, labels, main_similarity="dot", precision="float32"),
        e.InformationRetrievalEvaluator(queries, corpus, relevant, batch_size=4, name="find", **depth),
        e.InformationRetrievalEvaluator(queries, corpus, relevant, truncate_dim=7, query_prompt="dog ", **depth),
        e.TripletEvaluator(TEXTS[:5], TEXTS[5:10], TEXTS[10:15]),
        e.BinaryClassificationEvaluator(first, second, [n % 2 for n in range(8)]),
        e.RerankingEvaluator(
            [{"query": TEXTS[n], "positive": TEXTS[n + 1 : n + 3], "negative": TEXTS[n + 3 : n + 6]} for n in range(4)]
        ),
        e.TranslationEvaluator(first, second),
        e.ParaphraseMiningEvaluator(corpus, [("d0", "d9"), ("d2", "d11")]),
    ]


def test_the_librarys_evaluators_find_what_they_find_on_its_own_model(encoder: SentenceEncoder, theirs: Any) -> None:
    ours, own = evaluators(), evaluators()
    for mine, its in zip(ours, own, strict=True):
        assert mine(encoder) == pytest.approx(its(theirs), abs=1e-4)
        assert mine.primary_metric == its.primary_metric
        assert mine.primary_metric in encoder.model_card_data.eval_results_dict[mine]


@pytest.mark.parametrize(
    ("given", "asked", "message"),
    [
        (3, {}, "inputs: expected a text or texts, got int"),
        (b"a", {}, "inputs: expected a text or texts, got bytes"),
        (None, {}, "inputs: expected a text or texts, as inputs or by the older name sentences"),
        (["a", 3], {}, "text 1: expected text, got 3"),
        ("a", {"batch_size": 0}, "batch_size: expected a whole number of at least 1, got 0"),
        (
            "a",
            {"output_value": "tokens"},
            "output_value 'tokens': expected 'sentence_embedding' or 'token_embeddings' or None",
        ),
        (
            "a",
            {"precision": "int4"},
            "precision 'int4': expected 'float32' or 'int8' or 'uint8' or 'binary' or 'ubinary' or None",
        ),
        ("a", {"pool": 3}, "pool: expected one of start_multi_process_pool, got int"),
        (
            "a",
            {"device": ["cpu", "cuda:0"]},
            "device 'cuda:0': expected None or 'cpu'; the engines run where the bundle was loaded: "
            "nestforge.load(bundle, provider=...)",
        ),
        (
            "a",
            {"processing_kwargs": {}},
            "processing_kwargs: is no option of encode here; a bundle prepares texts as it was compiled to",
        ),
        (
            "a",
            {"device": "cuda"},
            "device 'cuda': expected None or 'cpu'; the engines run where the bundle was loaded: "
            "nestforge.load(bundle, provider=...)",
        ),
        ("a", {"truncate_dim": 17}, "truncate_dim: expected 1 to 16, got 17"),
        ("a", {"prompt_name": "qeury"}, "`prompt_name` 'qeury'; did you mean 'query'?"),
    ],
)
def test_refuses_in_one_line(encoder: SentenceEncoder, given: Any, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(nestforge.InputError) as error:
        encoder.encode(given, **asked)
    assert str(error.value) == message


def test_refuses_an_unknown_similarity(sentence_bundle: Path) -> None:
    with pytest.raises(nestforge.InputError, match="similarity_fn_name 'cosin'; did you mean 'cosine'"):
        SentenceEncoder(sentence_bundle, similarity_fn_name="cosin")


def test_a_device_needs_neither_library(sentence_bundle: Path) -> None:
    program = """
import sys
sys.modules |= dict.fromkeys(("torch", "transformers", "sentence_transformers"))  # importing one fails
import nestforge
from nestforge.integrations import SentenceEncoder
with SentenceEncoder(sys.argv[1]) as encoder:
    print(encoder.encode(["a dog", "fox"]).shape)
    for ask in (lambda: encoder.encode("a", convert_to_tensor=True), lambda: encoder.similarity([[1.0]], [[1.0]])):
        try:
            ask()
        except nestforge.InputError as error:
            print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(sentence_bundle)], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        f"(2, {HIDDEN})",
        "convert_to_tensor, or not convert_to_numpy: needs torch, which is not installed here; install it, or take "
        "numpy arrays",
        "similarity: needs sentence-transformers, which is not installed here; install it, or compare the arrays with "
        "numpy",
    ], done.stderr


def test_what_a_bundle_has_not_is_refused_with_the_reason(encoder: SentenceEncoder) -> None:
    with pytest.raises(AttributeError, match="'SentenceEncoder' object has no attribute 'fit': nothing is trained or"):
        encoder.fit([])
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        _ = encoder.nothing
    assert not hasattr(encoder, "tokenizer")
    with pytest.raises(nestforge.InputError, match="max_seq_length 8: texts are cut to 12 tokens here; for fewer"):
        encoder.max_seq_length = 8


def test_a_pool_of_processes_is_this_process(encoder: SentenceEncoder) -> None:
    pool = encoder.start_multi_process_pool(["cpu", torch.device("cpu")])
    expected = encoder.encode(["a dog", "the"])
    for found in (
        encoder.encode(["a dog", "the"], pool=pool, chunk_size=1),
        encoder.encode_multi_process(["a dog", "the"], pool),
        encoder.encode(["a dog", "the"], device=["cpu", "cpu"]),
    ):
        np.testing.assert_array_equal(found, expected)
    encoder.stop_multi_process_pool(pool)
    with pytest.raises(nestforge.InputError, match="device 'cuda:0': expected None or 'cpu'"):
        encoder.start_multi_process_pool(["cuda:0"])


def test_every_public_method_of_the_library_is_here_or_refused_with_a_reason(
    encoder: SentenceEncoder, theirs: Any
) -> None:
    names = {name for name in dir(theirs) if not name.startswith("_")} - set(dir(torch.nn.Module))
    missing = {name for name in names if not hasattr(encoder, name)}
    assert {name for name in missing if ": " not in absent("SentenceEncoder", name)} == set()
    assert names - missing == {
        *("encode", "encode_query", "encode_document", "encode_multi_process", "preprocess", "tokenize", "evaluate"),
        *("start_multi_process_pool", "stop_multi_process_pool", "truncate_dim", "truncate_embeddings", "device"),
        *("truncate_sentence_embeddings", "similarity", "similarity_pairwise", "similarity_fn_name", "prompts"),
        *("default_prompt_name", "max_seq_length", "get_max_seq_length", "get_embedding_dimension"),
        *("get_sentence_embedding_dimension", "model_card_data"),
    }
