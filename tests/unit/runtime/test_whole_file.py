"""A file that is written whole, or leaves what was there."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import pytest
from nestforge.errors import OutputError
from nestforge.runtime.whole_file import write_whole


def test_replaces_what_was_there_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "index.npz"
    path.write_bytes(b"old and longer")
    write_whole(path, lambda stream: stream.write(b"new"), "the index")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "index.npz"
    path.write_bytes(b"old")

    def disk_full(stream: IO[bytes]) -> None:
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(
        OutputError, match=r"index\.npz: cannot be written \(No space left on device\); the index was not"
    ):
        write_whole(path, disk_full, "the index")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"No such file or directory"):
        write_whole(tmp_path / "absent" / "file", lambda stream: stream.write(b""), "the index")
