"""The split leaks nothing, boilerplate and own names are gone, and the same packages give the same corpus."""

import random
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.examples.cost_eff.texts import (
    PARTS,
    SOURCES,
    Corpus,
    Limits,
    Rows,
    Source,
    part_of,
    read_corpus,
    read_jsonl,
    skeleton,
    to_jsonl,
)

WORDS = ("river", "stone", "cloud", "ember", "forest", "harbour", "lantern", "meadow", "mirror", "orchard", "pebble")
LIMITS = Limits(
    most={"train": 60, "calibration": 12, "test": 12},
    least={"train": 20, "calibration": 3, "test": 3},
    characters=40,
    tokens=40,
    classes=2,
)


def tokens_of(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) + 2 for text in texts]


def sentence(chance: random.Random) -> str:
    return f"The {' '.join(chance.choices(WORDS, k=8))}."


def make_package(folder: Path, name: str, modules: int, seed: int, each: int = 3) -> Source:
    """Modules with docstrings of two paragraphs, and one paragraph that all of them share."""
    chance = random.Random(seed)
    (folder / name).mkdir()
    for module in range(modules):
        functions = [
            f'def f{n}():\n    """{sentence(chance)}\n\n    {sentence(chance)}\n\n'
            f'    Raises `Error{module}` as every other module of this kind.\n    """\n'
            for n in range(each)
        ]
        own = f'"""This {name} module names its package in a sentence."""\n'
        (folder / name / f"m{module}.py").write_text(own + "\n".join(functions))
    return Source(name, name, name)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    monkeypatch.syspath_prepend(tmp_path)
    packages = [make_package(tmp_path, f"nf_pkg{n}", modules=40, seed=n) for n in range(3)]
    copied = (tmp_path / "nf_pkg0" / "m0.py").read_text()  # a module that stands in two packages
    (tmp_path / "nf_pkg1" / "copied.py").write_text(copied)
    return packages


def read(sources: Sequence[Source], limits: Limits = LIMITS) -> Corpus:
    return read_corpus(sources, limits, tokens_of, lambda *_: None)


def test_no_text_and_no_sentence_stands_in_two_parts(sources: list[Source]) -> None:
    corpus = read(sources)
    sentences = {
        part: {line for item in corpus.parts[part] for line in item.text.rstrip(".").split(". ")} for part in PARTS
    }
    assert all(len(found) > 20 for found in sentences.values())
    for one, other in (("train", "calibration"), ("train", "test"), ("calibration", "test")):
        assert not sentences[one] & sentences[other]
    texts = [item.text for part in PARTS for item in corpus.parts[part]]
    assert len(texts) == len(set(texts))


def test_a_module_is_in_one_part_whole(sources: list[Source], tmp_path: Path) -> None:
    corpus = read(sources)
    for part in PARTS:
        for item in corpus.parts[part]:
            label = corpus.labels[item.label]
            first = item.text.split(". ")[0].rstrip(".")
            (module,) = [path for path in (tmp_path / label).glob("*.py") if first in path.read_text()]
            assert part_of(f"{label}/{module.name}") == part


def test_copies_boilerplate_and_own_names_are_gone(sources: list[Source], tmp_path: Path) -> None:
    texts = " ".join(item.text for part in PARTS for item in read(sources).parts[part])
    assert "Raises" not in texts
    assert "names its package" not in texts
    copied = (tmp_path / "nf_pkg1" / "copied.py").read_text()
    assert not any(line.strip(' ".') in texts for line in copied.splitlines() if "The " in line)


def test_paragraphs_are_packed_while_they_fit(sources: list[Source]) -> None:
    joined = [item.text for item in read(sources).parts["train"]]
    assert {text.count(".") for text in joined} == {2}
    apart = read(sources, Limits(LIMITS.most, LIMITS.least, characters=40, tokens=12, classes=2)).parts["train"]
    assert {item.text.count(".") for item in apart} == {1}


def test_limits_of_a_class(sources: list[Source], tmp_path: Path) -> None:
    few = make_package(tmp_path, "nf_few", modules=4, seed=9)
    absent = Source("nf_absent", "nf_absent", "nf_absent")
    corpus = read([*sources, few, absent])
    assert list(corpus.labels) == ["nf_pkg0", "nf_pkg1", "nf_pkg2"]
    assert corpus.excluded["nf_absent"] == "the package is not installed"
    assert corpus.excluded["nf_few"].startswith("too few: ")
    assert all(corpus.counts[label]["train"] == 60 for label in corpus.labels)
    assert [sum(item.label == n for item in corpus.parts["test"]) for n in range(3)] == [
        corpus.counts[label]["test"] for label in corpus.labels
    ]
    with pytest.raises(CheckpointError, match="training texts: 0 packages have enough docstrings, expected at least 2"):
        read([few, absent])


def test_the_same_packages_give_the_same_corpus(sources: list[Source], tmp_path: Path) -> None:
    first, again = read(sources), read(sources[::-1])
    assert all(to_jsonl(first.parts[part]) == to_jsonl(again.parts[part]) for part in PARTS)
    (tmp_path / "train.jsonl").write_text(to_jsonl(first.parts["train"]))
    assert read_jsonl(tmp_path / "train.jsonl") == list(first.parts["train"])


def test_the_split_by_module_is_fixed() -> None:
    modules = [f"torch/nn/module{n}.py" for n in range(1000)]
    parts = [part_of(module) for module in modules]
    assert parts[:8] == [part_of(module) for module in modules[:8]]
    assert 700 < parts.count("train") < 820
    assert min(parts.count("calibration"), parts.count("test")) > 90


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Returns the `FooModel` of config_a.", "returns the `BarModel` of other_config"),
        ("Raises ValueError if x1 is 3.", "Raises TypeError, if y2 is 44!"),
        ("See torch.nn.Linear for more.", "See numpy.linalg.norm for more."),
    ],
)
def test_texts_with_the_same_skeleton(one: str, other: str) -> None:
    assert skeleton(one) == skeleton(other) != ""


def test_different_words_are_different_skeletons() -> None:
    assert skeleton("Returns the mean.") != skeleton("Returns the median.")


def test_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nf_unimportable").mkdir()
    (tmp_path / "nf_unimportable" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert Source("x", "nf_unimportable", "x").folder() == tmp_path / "nf_unimportable"
    assert Source("x", "nf_not_installed", "x").folder() is None
    assert Source("x", None, "x").folder() == Path(sysconfig.get_path("stdlib"))
    assert "nf_unimportable" not in sys.modules


def test_labels_are_different_and_enough() -> None:
    assert len({source.label for source in SOURCES}) == len(SOURCES) >= 8


def rows_of(lengths: list[int]) -> Rows:
    return Rows([[row + 1] * length for row, length in enumerate(lengths)], list(range(len(lengths))), pad=0)


def test_padding_is_masked_and_fills_up_to_the_longest() -> None:
    batch = rows_of([2, 4, 1]).batch([0, 2, 1])
    assert batch.input_ids.tolist() == [[1, 1, 0, 0], [3, 0, 0, 0], [2, 2, 2, 2]]
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert batch.labels.tolist() == [0, 2, 1]


def test_in_order_leaves_nothing_out() -> None:
    batches = rows_of([3] * 7).in_order(3)
    assert [batch.labels.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]


def test_an_epoch_has_every_text_once_and_little_padding() -> None:
    chance = random.Random(0)
    rows = rows_of([chance.randint(3, 64) for _ in range(256)])
    epoch = rows.shuffled(size=16, steps=16, seed=3)
    assert sorted(int(label) for batch in epoch for label in batch.labels) == list(range(256))
    real = sum(int(batch.attention_mask.sum()) for batch in epoch)
    assert real == rows.tokens
    assert real > 0.9 * sum(batch.attention_mask.numel() for batch in epoch)


def test_steps_and_seed_decide_the_order() -> None:
    rows = rows_of([5, 6, 7, 8, 9])
    first, again, other = (rows.shuffled(2, 7, seed) for seed in (0, 0, 1))
    assert len(first) == 7  # three batches an epoch
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(first, again, strict=True))
    assert any(a.labels.tolist() != b.labels.tolist() for a, b in zip(first, other, strict=True))
