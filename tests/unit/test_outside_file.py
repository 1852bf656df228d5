"""Files of users: read whole, and refused where they have no end or too many bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from nestforge.errors import CheckpointError
from nestforge.outside_file import read_file

NO_FILE = "expected a file, not a folder, a pipe or a device"


def refusal(path: Path, max_bytes: int = 8) -> str:
    with pytest.raises(CheckpointError) as error:
        read_file(path, max_bytes, CheckpointError)
    return str(error.value).removeprefix(f"{path}: ")


def test_a_file_is_read_whole_through_a_link_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345678")
    (tmp_path / "link").symlink_to("a")
    assert read_file(tmp_path / "link", 8, CheckpointError) == b"12345678"
    assert refusal(tmp_path / "link", 7) == "8 bytes, more than the 7 allowed"


def test_what_has_no_end_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "endless", tmp_path):
        assert refusal(path) == NO_FILE


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == "cannot be read (No such file or directory)"
    assert refusal(tmp_path / "a\0b").endswith("cannot be read (embedded null byte)")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    assert refusal(tmp_path / "sparse") == "1099511627776 bytes, more than the 8 allowed"
