"""Writers that wait for each other, and for whoever locks what they write."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from nestforge import file_lock
from nestforge.errors import OutputError

ME = f"process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[int]:
    """Has the folder locked, as anybody who may read it can."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    yield descriptor
    os.close(descriptor)


def test_a_writer_gives_up_and_says_who_has_the_lock(
    tmp_path: Path, reader: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_lock, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(file_lock, "_MOST_SECONDS", 0.1)
    with (
        pytest.raises(OutputError) as refused,
        file_lock.alone(tmp_path),
    ):
        raise AssertionError
    assert str(refused.value) == (
        f"{tmp_path}: locked by {ME} for 0 s; nothing was written; wait until that is done, or end it, and try again"
    )
    assert caplog.messages == [f"{tmp_path}: locked by {ME}; waiting for at most 0.1 s"]
    fcntl.flock(reader, fcntl.LOCK_UN)
    with file_lock.alone(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_writer_goes_on_when_the_lock_is_gone(
    tmp_path: Path, reader: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_lock.time, "sleep", lambda _: fcntl.flock(reader, fcntl.LOCK_UN))
    with file_lock.alone(tmp_path):
        pass
    assert caplog.messages == [], "nothing is said of a short wait"


def test_a_folder_that_cannot_be_locked_is_written_all_the_same(tmp_path: Path) -> None:
    with file_lock.alone(tmp_path / "none"):
        pass


def test_holders_that_the_system_does_not_tell(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert file_lock.holders(file.fileno()) == "another process"
