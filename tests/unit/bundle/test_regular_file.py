from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from nestforge.bundle.files import identity_at, regular_file, stream_sha256
from nestforge.errors import BundleCorruptError, BundleFormatError


def test_a_file_is_open_with_the_identity_of_its_path(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"nest")
    with regular_file(path) as (file, identity):
        assert file.read() == b"nest"
    assert identity == identity_at(path)
    path.write_bytes(b"forge!")
    assert identity != identity_at(path)
    assert identity_at(tmp_path / "none") is None


def test_whatever_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe"):
        with pytest.raises(BundleFormatError, match=f"{name}: expected a regular file"), regular_file(tmp_path / name):
            pass
    with (
        pytest.raises(BundleCorruptError, match="none: missing; fetch the bundle again"),
        regular_file(tmp_path / "none"),
    ):
        pass


@pytest.mark.parametrize("size", [0, 1, 2**18, 2**18 + 1, 3 * 2**18 + 5])
def test_a_hash_is_of_what_is_left_of_the_file(tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    path = tmp_path / "f"
    path.write_bytes(b"head" + content[:size])
    with path.open("rb") as file:
        file.read(4)
        assert stream_sha256(file) == hashlib.sha256(content[:size]).hexdigest()
