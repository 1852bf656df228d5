"""Prose of docstrings, read from sources that are never imported."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest
from nestforge.examples.train.exits.docstrings import SOURCES, Source, docstrings

MODULE = '''"""One sentence of a module, long enough to be prose.

A second paragraph that
spans two lines and is joined.

>>> print("a console transcript is not prose, however long.")

Parameters without a full stop are no prose either
"""
raise RuntimeError("imported")

class Class:
    """Too short."""

    async def method(self):
        """A method speaks too, in a sentence of its own."""
'''


def test_paragraphs_of_each_docstring(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    assert list(docstrings(tmp_path / "module.py")) == [
        [
            "One sentence of a module, long enough to be prose.",
            "A second paragraph that spans two lines and is joined.",
        ],
        ["A method speaks too, in a sentence of its own."],
    ]


@pytest.mark.parametrize("source", [b"def (", b"\xff\xfe\x00", b'"\\d"  # an invalid escape'])
def test_what_is_no_python_has_no_docstrings(tmp_path: Path, source: bytes) -> None:
    (tmp_path / "template.py").write_bytes(source)
    assert list(docstrings(tmp_path / "template.py")) == []


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
