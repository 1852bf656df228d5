import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nestforge.compiler.examples.corpus import Corpus, read_array_corpus, read_corpus, samples_of
from nestforge.errors import CheckpointError, InputError
from nestforge.exporters.source import open_source
from support.tiny_compile import save_tiniest


def write(path: Path, lines: list[str]) -> Path:
    path.write_bytes("\n".join(lines).encode())
    return path


def numbered(count: int) -> list[str]:
    return [f"text number {n}" for n in range(count)]


def test_no_text_is_in_both_parts_and_one_in_five_is_held_out(tmp_path: Path) -> None:
    corpus = read_corpus(write(tmp_path / "t", numbered(500)))
    assert not set(corpus.calibration) & set(corpus.held_out)
    assert (len(corpus.calibration), 70 < len(corpus.held_out) < 130) == (128, True)
    assert {*corpus.calibration, *corpus.held_out} <= set(numbered(500))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), extra=st.integers(0, 400))
def test_a_text_never_changes_its_part(tmp_path: Path, seed: int, extra: int) -> None:
    """Neither the order of the lines nor lines that are added may leak a calibration text into what is held out."""
    lines = numbered(300 + extra)
    small, large = read_corpus(write(tmp_path / "a", numbered(300))), lines[:]
    random.Random(seed).shuffle(large)
    grown = read_corpus(write(tmp_path / "b", large))
    assert not set(small.calibration) & set(grown.held_out)
    assert not set(grown.calibration) & set(small.held_out)
    assert grown == read_corpus(write(tmp_path / "c", lines))


def test_blank_and_repeated_lines_and_outer_spaces_count_for_nothing(tmp_path: Path) -> None:
    noisy = [line for text in numbered(300) for line in (f"  {text}\t", "", text, "   ")]
    assert read_corpus(write(tmp_path / "a", noisy)) == read_corpus(write(tmp_path / "b", numbered(300)))


def test_windows_line_ends_and_other_scripts(tmp_path: Path) -> None:
    texts = [f"{n}. 香山看红叶 für ñandú" for n in range(300)]
    (tmp_path / "windows").write_bytes("\r\n".join(texts).encode())
    assert read_corpus(tmp_path / "windows") == read_corpus(write(tmp_path / "unix", texts))


def test_a_large_file_is_sampled_over_its_whole_length(tmp_path: Path) -> None:
    corpus = read_corpus(write(tmp_path / "t", numbered(5000)))
    assert (len(corpus.calibration), len(corpus.held_out)) == (128, 100)
    places = [int(text.rsplit(" ", 1)[1]) for text in (*corpus.calibration, *corpus.held_out)]
    assert min(places) < 500
    assert max(places) > 4500


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        (b"", "0 different texts; expected at least 200, one per line"),
        (b"\n \n\t\n" * 500, "0 different texts"),
        (b"one text\n" * 500, "1 different texts"),
        ("\n".join(numbered(40)).encode(), "40 different texts"),
        (b"\x00" * 10_000, "1 different texts"),
        (bytes(range(256)) * 40, "expected a UTF-8 text file with one text per line"),
        ("\n".join(numbered(300)).encode("utf-16"), "expected a UTF-8 text file with one text per line"),
    ],
    ids=["missing", "empty", "blank", "repeated", "few", "zeros", "binary", "utf-16"],
)
def test_what_is_no_corpus(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as refusal:
        read_corpus(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert problem in str(refusal.value)
    assert "\n" not in str(refusal.value)


def rows(path: Path, count: int, seed: int = 0, labelled: bool = True, **changes: np.ndarray) -> Path:
    """``count`` different rows for the tiny classifier, and one of them twice."""
    ids = np.random.default_rng(seed).integers(4, 24, (count, 8))
    arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    arrays = {name: np.concatenate([array, array[:1]]) for name, array in arrays.items()}
    if labelled:
        arrays["labels"] = arrays["input_ids"][:, 0] % 2
    np.savez(path, **{**arrays, **changes})
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiniest(tmp_path_factory.mktemp("rows") / "m", task="ForSequenceClassification")


def test_rows_are_parted_as_texts_are(classifier: Path, tmp_path: Path) -> None:
    source = open_source(classifier)
    corpus = read_array_corpus(rows(tmp_path / "a.npz", 300), source)
    parts = [{row.tobytes() for row in part.feeds["input_ids"]} for part in (corpus.calibration, corpus.held_out)]
    assert (len(parts[0]), not parts[0] & parts[1]) == (128, True)
    assert corpus.held_out.size == len(parts[1]), "no row twice"
    assert 30 < len(parts[1]) < 100
    assert corpus.held_out.labels is not None
    assert (corpus.held_out.labels == corpus.held_out.feeds["input_ids"][:, 0] % 2).all()


def test_a_row_never_changes_its_part(classifier: Path, tmp_path: Path) -> None:
    source = open_source(classifier)
    small = read_array_corpus(rows(tmp_path / "a.npz", 300), source)
    grown = read_array_corpus(rows(tmp_path / "b.npz", 700), source)
    for one, other in ((small.calibration, grown.held_out), (grown.calibration, small.held_out)):
        contents = [{row.tobytes() for row in part.feeds["input_ids"]} for part in (one, other)]
        assert not contents[0] & contents[1]


def test_a_resumed_compile_tells_other_rows_and_labels_apart(classifier: Path, tmp_path: Path) -> None:
    source = open_source(classifier)
    keys = [
        read_array_corpus(path, source).key
        for path in (
            rows(tmp_path / "a.npz", 300),
            rows(tmp_path / "b.npz", 300),
            rows(tmp_path / "c.npz", 300, seed=1),
            rows(tmp_path / "d.npz", 300, labelled=False),
        )
    ]
    assert keys[0] == keys[1]
    assert len({str(key) for key in keys}) == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"labels": np.full(301, 2)}, r"labels: row 0 has 2, expected 0\.\.1"),
        ({"labels": np.zeros(5, int)}, "labels: expected 301 whole numbers"),
        ({"pixels": np.zeros(301)}, "inputs attention_mask, input_ids, pixels, token_type_ids: expected exactly"),
    ],
)
def test_rows_that_do_not_fit_the_model(
    classifier: Path, tmp_path: Path, changes: dict[str, np.ndarray], problem: str
) -> None:
    path = rows(tmp_path / "r.npz", 300, **changes)
    with pytest.raises(InputError, match=problem) as refusal:
        read_array_corpus(path, open_source(classifier))
    assert str(refusal.value).startswith(f"{path}: ")


def test_rows_that_are_too_few(classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="40 different rows; expected at least 200"):
        read_array_corpus(rows(tmp_path / "r.npz", 40), open_source(classifier))


def test_texts_are_no_samples_of_a_model_without_a_tokenizer() -> None:
    assert samples_of(Corpus(("one",), ("two",)), "held_out", None) is None
    assert samples_of(None, "calibration", None) is None
