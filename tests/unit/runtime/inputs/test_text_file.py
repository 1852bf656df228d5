from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
from nestforge.errors import CheckpointError, InputError
from nestforge.runtime.inputs.text_file import read_text_file


def test_what_a_file_holds(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes("a\r\n\u00fc\n".encode())
    assert read_text_file(tmp_path / "t") == "a\r\n\u00fc\n"


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "folder"])
def test_what_has_no_end_is_refused_and_not_waited_for(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=f"{path}: expected a file, not a folder, a pipe or a device"):
        read_text_file(tmp_path / path, CheckpointError)


def test_what_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestforge.runtime.inputs.text_file.MAX_TEXT_BYTES", 2)
    (tmp_path / "t").write_text("abc")
    with pytest.raises(InputError, match="t: more than the 2 bytes allowed; split it"):
        read_text_file(tmp_path / "t")
    (tmp_path / "t").write_text("ab")
    assert read_text_file(tmp_path / "t") == "ab"


def test_what_is_missing_or_not_utf_8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none: cannot be read \(No such file or directory\)"):
        read_text_file(tmp_path / "none")
    (tmp_path / "t").write_bytes(b"a\nb\n\xff\n")
    with pytest.raises(InputError, match="t: line 3: not UTF-8; expected a UTF-8 text file with one text per line"):
        read_text_file(tmp_path / "t")


def test_a_file_takes_memory_for_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a\n")
    tracemalloc.start()
    try:
        read_text_file(tmp_path / "t")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
