from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from nestforge.errors import InputError
from nestforge.runtime.consistency.texts import keyed_texts


def test_different_lines_in_the_order_of_their_hashes(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("b\n\n  a \nb\nc\n")
    found = keyed_texts(path, InputError)
    assert sorted(text for _, text in found) == ["a", "b", "c"]
    assert [key for key, _ in found] == sorted(hashlib.sha256(text.encode()).digest() for text in "abc")


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none: cannot be read \(No such file or directory\)"):
        keyed_texts(tmp_path / "none", InputError)
    path = tmp_path / "texts.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"texts\.txt: line 1: not UTF-8; expected a UTF-8 text file"):
        keyed_texts(path, InputError)
