"""The demo's calibration text: deterministic, de-duplicated, prose only."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.errors import CheckpointError
from nestforge.examples.encoder import corpus

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
