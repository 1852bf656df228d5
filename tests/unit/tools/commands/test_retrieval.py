"""``nestforge index`` and ``nestforge search`` on a tiny bundle."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.retrieval.index import Index
from support.commands import error_of, json_of, nestforge
from support.tokenizer_files import WORDS

TEXTS = [f"the {a} {b}" for a in WORDS[2:8] for b in WORDS[8:12]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("retrieval") / "corpus.txt"
    path.write_text("\n".join([*TEXTS[:5], "", "  ", *TEXTS[5:]]) + "\n")
    return path


@pytest.fixture(scope="module")
def index(compiled: Any, corpus: Path) -> Path:
    path = corpus.with_name("corpus.index")
    assert nestforge("index", compiled.bundle, "--text", corpus, "--output", path).exit_code == 0
    return path


def test_index_says_what_it_wrote(compiled: Any, corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "my.index"
    result = nestforge("index", compiled.bundle, "--text", corpus, "--output", path)
    weights = next(f.sha256 for f in open_bundle(compiled.bundle).manifest.files if f.path == WEIGHTS_NAME)
    assert result.stderr == "encode: 24/24\n"
    assert result.stdout.splitlines() == [
        "rows         24 x 32, output sentence_embedding",
        "left out     2 blank lines",
        "compared by  cosine, ties: lowest row",
        "built by     ffn64-heads4@b1-s8",
        f"weights      {weights}",
        f"kept in      {path}",
    ]
    assert Index.load(path).entries == tuple(TEXTS)
    data = json_of("index", compiled.bundle, "--text", corpus, "--output", tmp_path / "second.index")
    assert (data["identity"]["rows"], data["blank"], data["labels"]) == (24, 2, False)
    assert (tmp_path / "second.index").read_bytes() == path.read_bytes()


def test_index_refuses(compiled: Any, corpus: Path, index: Path, tmp_path: Path) -> None:
    start = ["index", compiled.bundle, "--text", corpus, "--output"]
    assert error_of(*start, index) == f"{index}: exists already; choose another file or `--overwrite`"
    assert "no such folder" in error_of(*start, tmp_path / "none" / "i.index")
    assert "output 'x' is no embedding" in error_of(*start, tmp_path / "i.index", "--embedding", "x")
    long = tmp_path / "long.txt"
    long.write_text("the fox\n" + "the " * 30)
    arguments = ["index", compiled.bundle, "--text", long, "--output", tmp_path / "i.index"]
    assert "row 1: 32 steps, the largest bucket takes 8" in error_of(*arguments)
    assert "\ntruncated    1 texts\n" in nestforge(*arguments, "--truncate").stdout
    for name, content, message in (
        ("empty.txt", b"\n \n", "has no texts; expected one a line"),
        ("latin.txt", b"the fox\n\xe9t\xe9\n", "line 2: not UTF-8"),
        ("none.txt", None, "cannot be read"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert message in error_of("index", compiled.bundle, "--text", tmp_path / name, "--output", tmp_path / "o")
    for wrong in ([], ["--text", corpus, "--data", corpus], ["--data", corpus, "--truncate"]):
        assert nestforge("index", compiled.bundle, "--output", tmp_path / "o", *wrong).exit_code == 2


def test_search_finds_and_says_who_answered(compiled: Any, index: Path) -> None:
    data = json_of("search", compiled.bundle, index, "--query", TEXTS[3], "--query", TEXTS[9], "--k", "2")
    assert (data["submodel"], data["reason"]) == ("ffn64-heads4", "no limit given: the largest submodel")
    assert [row["query"] for row in data["queries"]] == [TEXTS[3], TEXTS[9]]
    assert [row["hits"][0]["id"] for row in data["queries"]] == [3, 9]
    assert data["queries"][0]["hits"][0]["entry"] == TEXTS[3]
    assert data["queries"][0]["hits"][0]["score"] == pytest.approx(1, abs=1e-5)
    small = nestforge("search", compiled.bundle, index, "--query", TEXTS[3], "--budget", "small", "--k", "3")
    lines = small.stdout.splitlines()
    assert not lines[0].endswith("ffn64-heads4")
    assert lines[1].startswith("because   budget small: ")
    assert lines[5] == f"query {TEXTS[3]}"
    assert lines[6].split() == ["row", "cosine", "entry"]
    assert len(lines) == 10


def test_what_an_index_holds_does_not_speak_to_the_terminal(compiled: Any, index: Path, tmp_path: Path) -> None:
    found = Index.load(index)
    hostile = Index(found.identity, found.embeddings, ("\x1b]0;owned\x1b\x9b31m" + TEXTS[0], *TEXTS[1:]))
    hostile.save(tmp_path / "i.index")
    shown = nestforge("search", compiled.bundle, tmp_path / "i.index", "--query", TEXTS[0], "--k", "1").stdout
    assert "\x1b" not in shown
    assert rf"\x1b]0;owned\x1b\x9b31m{TEXTS[0]}" in shown


def test_search_compares_every_submodel(compiled: Any, index: Path, tmp_path: Path) -> None:
    queries = tmp_path / "queries.txt"
    queries.write_text("\n".join(f"{text} of" for text in TEXTS[:10]))
    data = json_of("search", compiled.bundle, index, "--queries", queries, "--compare", "--k", "5")
    assert (data["k"], data["queries"]) == (5, 10)
    universal, small = data["submodels"]
    assert (universal["submodel"], universal["recall_at_k"], universal["flops_saved"]) == ("ffn64-heads4", 1, 0)
    assert small["flops_saved"] > 0
    assert 0 <= small["recall_at_k"] <= 1
    text = nestforge("search", compiled.bundle, index, "--queries", queries, "--compare", "--k", "5").stdout
    assert re.search(r"^XL +\S+ +0.0 % +\S+ +0.0 % +1.000 +100.0 % +\S+$", text, re.MULTILINE)
    assert text.endswith("\n10 queries; recall and nearest rows are compared with the first line's\n")
    assert "accuracy" not in text


def test_arrays_with_labels(compiled: Any, tmp_path: Path) -> None:
    names = [spec.name for spec in open_bundle(compiled.bundle).manifest.inputs]
    rng = np.random.default_rng(0)
    for name, rows in (("corpus", 20), ("queries", 6)):
        ids = rng.integers(4, 20, (rows, 8))
        feeds = {each: ids if each == "input_ids" else np.zeros_like(ids) for each in names}
        feeds["attention_mask"] = np.ones_like(ids)
        np.savez(tmp_path / f"{name}.npz", labels=np.arange(rows) % 3, **feeds)
    path = tmp_path / "arrays.index"
    data = json_of("index", compiled.bundle, "--data", tmp_path / "corpus.npz", "--output", path)
    assert (data["labels"], data["identity"]["entries"]) == (True, "none")
    arguments = ["search", compiled.bundle, path, "--data", tmp_path / "queries.npz"]
    compared = json_of(*arguments, "--compare")["submodels"]
    assert all(each["accuracy"] * 6 == pytest.approx(round(each["accuracy"] * 6)) for each in compared)
    assert "accuracy" in nestforge(*arguments, "--compare").stdout
    assert "\nquery 5\nrow  cosine\n" in nestforge(*arguments).stdout


def test_search_refuses(compiled: Any, index: Path, tmp_path: Path) -> None:
    start = ["search", compiled.bundle, index]
    assert "no budget 'smal'" in error_of(*start, "--query", "a", "--budget", "smal")
    damaged = tmp_path / "damaged.index"
    damaged.write_bytes(index.read_bytes()[:-30])
    assert error_of("search", compiled.bundle, damaged, "--query", "a").startswith(f"{damaged}: expected an NPZ file")
    for wrong in (
        [],
        ["--query", "a", "--queries", "b"],
        ["--query", "a", "--budget", "small", "--submodel", "S"],
        ["--query", "a", "--compare", "--submodel", "S"],
        ["--data", "x.npz", "--truncate"],
        ["--query", "a", "--k", "0"],
    ):
        assert nestforge(*start, *wrong).exit_code == 2


def test_an_index_of_another_universal_is_one_clear_line(compiled: Any, index: Path, tmp_path: Path) -> None:
    with np.load(index) as archive:
        members = dict(archive)
    identity = json.loads(members["identity"].tobytes()) | {"weights_sha256": "a" * 64}
    members["identity"] = np.frombuffer(json.dumps(identity).encode(), np.uint8)
    other = tmp_path / "other.index"
    with other.open("wb") as stream:
        np.savez(stream, **members)
    assert error_of("search", compiled.bundle, other, "--query", "a").startswith(
        f"index {other}: built by another universal model ('tiny', weights aaaaaaaaaaaa) than bundle {compiled.bundle}"
    )
