"""The demo's calibration text: deterministic, de-duplicated, prose only."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.examples.demo import corpus

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
