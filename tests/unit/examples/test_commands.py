"""Demonstrations: their commands, the text that calibrates an encoder, and the picture of a nested model."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.nest import nest
from nestforge.errors import CheckpointError, PlanError
from nestforge.examples.commands import output_option, training
from nestforge.examples.encoder import corpus
from nestforge.examples.nest.__main__ import draw_levels, level_points, points_table
from support.tiny_compile import board, save_tiniest
from support.tiny_models import add_pooling
from support.tiny_models import corpus as texts


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@click.command()
@output_option("demo/some", "the models")
def train(output: Path) -> None:
    with training(output):
        if output.name == "full":
            raise OSError(28, "No space left on device")
        if output.name == "odd":
            raise PlanError("a width of 0")


@pytest.mark.parametrize(
    ("folder", "line"),
    [("full", "train: error: full: No space left on device\n"), ("odd", "train: error: a width of 0\n")],
)
def test_errors_are_one_line_and_exit_code_1(folder: str, line: str) -> None:
    ended = CliRunner().invoke(train, ["--output", folder])
    assert (ended.exit_code, ended.stderr) == (1, line)


def test_the_folder_and_what_it_holds_are_in_the_help() -> None:
    assert CliRunner().invoke(train, []).exit_code == 0
    help_text = " ".join(CliRunner().invoke(train, ["--help"]).output.split())
    assert "Folder for the models and training.json. What is finished in it is kept. [default: demo/some]" in help_text


SOURCE = '''"""One sentence of a module, long enough to be taken into the corpus.

A second paragraph that
spans two lines and is joined into one.

>>> print("a console transcript is not prose, however long it may be.")
"""

def function():
    """One sentence of a module, long enough to be taken into the corpus."""

class Class:
    """Too short."""

    async def method(self):
        """a paragraph without a capital letter at its beginning is left out."""
'''


@pytest.fixture
def stdlib(tmp_path: Path) -> Path:
    folder = tmp_path / "lib"
    (folder / "test").mkdir(parents=True)
    (folder / "module.py").write_text(SOURCE)
    (folder / "broken.py").write_text("def (")
    (folder / "test" / "ignored.py").write_text('"""A docstring of the test suite, which is not taken at all."""')
    return folder


def test_prose_paragraphs_once_each(stdlib: Path, tmp_path: Path) -> None:
    assert corpus.write_corpus(tmp_path / "corpus.txt", stdlib) == 2
    assert sorted((tmp_path / "corpus.txt").read_text().splitlines()) == [
        "A second paragraph that spans two lines and is joined into one.",
        "One sentence of a module, long enough to be taken into the corpus.",
    ]


def test_same_sources_same_bytes_and_no_more_than_the_limit(
    stdlib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.write_corpus(tmp_path / "first.txt", stdlib)
    corpus.write_corpus(tmp_path / "second.txt", stdlib)
    assert (tmp_path / "first.txt").read_bytes() == (tmp_path / "second.txt").read_bytes()
    monkeypatch.setattr(corpus, "LINES", 1)
    assert corpus.write_corpus(tmp_path / "third.txt", stdlib) == 1
    assert (tmp_path / "first.txt").read_text().startswith((tmp_path / "third.txt").read_text())


def test_the_link_leads_to_the_folder_that_is_installed_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(corpus, "demo_checkpoint", lambda name=name: tmp_path / name)
        link = corpus.link_checkpoint(tmp_path / "minilm")
        assert (link, link.resolve()) == (tmp_path / "minilm", tmp_path / name)
    (tmp_path / "new").rmdir()
    assert corpus.link_checkpoint(link).is_symlink()  # one that leads nowhere is replaced as well


def test_what_is_no_link_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "demo_checkpoint", lambda: tmp_path / "model")
    (tmp_path / "minilm").mkdir()
    with pytest.raises(CheckpointError, match="minilm: expected nothing or a link"):
        corpus.link_checkpoint(tmp_path / "minilm")
    assert (tmp_path / "minilm").is_dir()


def test_every_level_has_its_worth_and_its_latency(tmp_path: Path) -> None:
    model, text = save_tiniest(tmp_path / "model"), texts(tmp_path / "texts.txt")
    add_pooling(model)
    report = nest(model, text, tmp_path / "nested", steps=2)
    compile_bundle(report.output, board(budgets={"full": {}}), tmp_path / "nested.bundle")

    points = level_points(report.output, tmp_path / "nested.bundle")
    stated = [(level.label, level.submodel, level.ranked, level.nested) for level in report.levels]
    assert [(point.label, point.submodel, point.ranked, point.nested) for point in points] == stated
    assert all(point.milliseconds > 0 for point in points)
    assert [row[:2] for row in points_table(points).rows] == [[label, submodel] for label, submodel, *_ in stated]

    for name in ("curve.svg", "again.svg"):
        draw_levels(points, tmp_path / name)
    drawn = (tmp_path / "curve.svg").read_text()
    assert drawn == (tmp_path / "again.svg").read_text()
    assert all(f"<!-- {point.label} -->" in drawn for point in points)
