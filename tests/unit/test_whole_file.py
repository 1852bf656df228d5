"""Files that are written whole, or leave what was there; what a killed writer left is removed by the next."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from nestforge import whole_file
from nestforge import whole_file as whole_file_module
from nestforge.errors import OutputError
from nestforge.whole_file import exchange, folder_beside, require_new, write_whole
from support.processes import die, killed


def write_new(stream: IO[bytes]) -> None:
    stream.write(b"new")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_replaces_what_was_there_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "index.npz"
    path.write_bytes(b"old and longer")
    write_whole(path, write_new, "the index")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["index.npz"]


@pytest.mark.parametrize(
    ("umask", "mode", "expected"), [(0o022, 0o666, 0o644), (0o077, 0o666, 0o600), (0, 0o600, 0o600)]
)
def test_the_rights_are_those_of_any_new_file(tmp_path: Path, umask: int, mode: int, expected: int) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "file", write_new, "the file", mode=mode)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == expected


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
    assert names(tmp_path) == ["index.npz"]


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(stream: IO[bytes]) -> None:
        stream.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", interrupted, "the file")
    assert names(tmp_path) == []


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"No such file or directory"):
        write_whole(tmp_path / "absent" / "file", write_new, "the index")


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    killed(lambda: write_whole(tmp_path / "one", die, "the file"))
    (left,) = names(tmp_path)
    assert left.startswith(".nestforge-")
    write_whole(tmp_path / "two", write_new, "the file")
    assert names(tmp_path) == ["two"]


def test_what_another_writer_is_at_work_on_is_left_alone(tmp_path: Path) -> None:
    def meanwhile(stream: IO[bytes]) -> None:
        write_whole(tmp_path / "inner", write_new, "the file")
        stream.write(b"outer")

    write_whole(tmp_path / "outer", meanwhile, "the file")
    assert names(tmp_path) == ["inner", "outer"]
    assert (tmp_path / "outer").read_bytes() == b"outer"


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_new_file_takes_the_place_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError

    if not links:
        monkeypatch.setattr(os, "link", no_links)

    def meanwhile(stream: IO[bytes]) -> None:
        (tmp_path / "file").write_bytes(b"another's")

    write_whole(tmp_path / "first", write_new, "the file", new=True)
    with pytest.raises(OutputError, match=r"file: exists already; choose another file$"):
        write_whole(tmp_path / "file", meanwhile, "the file", new=True)
    assert names(tmp_path) == ["file", "first"]
    assert (tmp_path / "file").read_bytes() == b"another's"


def test_a_folder_beside_is_renamed_or_removed(tmp_path: Path) -> None:
    with folder_beside(tmp_path) as folder:
        (folder / "inside").touch()
        folder.rename(tmp_path / "kept")
    with folder_beside(tmp_path) as folder:
        (folder / "inside").touch()
    assert names(tmp_path) == ["kept"]


def test_a_folder_of_a_killed_process_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    def fill() -> None:
        with folder_beside(tmp_path) as folder:
            (folder / "inside").touch()
            die()

    killed(fill)
    assert len(names(tmp_path)) == 2
    with folder_beside(tmp_path) as mine:
        write_whole(tmp_path / "file", write_new, "the file")
        assert mine.is_dir()
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("there", "exists already; choose another file"),
        ("dangling", "exists already; choose another file"),
        ("absent/file", "cannot be written (no such folder)"),
        ("there/file", "cannot be written (no such folder)"),
        ("x" * 5000, "cannot be written (File name too long)"),
        ("x" * 5000 + "/file", "cannot be written (File name too long)"),
    ],
    ids=lambda value: value[:20],
)
def test_a_file_that_cannot_be_new_is_refused_before_any_work(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "there").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(OutputError) as refusal:
        require_new(tmp_path / name)
    assert str(refusal.value).startswith(str(tmp_path / name)[:100])
    assert str(refusal.value).endswith(f": {problem}")
    assert len(str(refusal.value)) < 3000


@pytest.mark.parametrize("path", ["/proc/x/y", "/dev/full", "/dev/full/x"])
def test_places_that_hold_no_files(path: str) -> None:
    with pytest.raises(OutputError, match=r"exists already|cannot be written"):
        require_new(Path(path))


def test_looking_whether_a_file_can_be_new_removes_what_was_left(tmp_path: Path) -> None:
    killed(lambda: write_whole(tmp_path / "one", die, "the file"))
    require_new(tmp_path / "one")
    assert names(tmp_path) == []


@pytest.mark.parametrize("can", [True, False])
def test_two_folders_change_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can: bool) -> None:
    if not can:
        monkeypatch.setattr(whole_file_module.ctypes, "CDLL", lambda *_, **__: object())
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    exchange(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["new"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["old"]


def test_a_file_may_be_replaced_where_that_was_asked_for_and_a_folder_never(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    require_new(tmp_path / "a", overwrite=True)
    with pytest.raises(OutputError, match="a: exists already; choose another file or `overwrite=True`"):
        require_new(tmp_path / "a", overwrite=False)
    with pytest.raises(OutputError, match="exists already"):
        require_new(tmp_path, overwrite=True)


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
    monkeypatch.setattr(whole_file, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(whole_file, "_MOST_SECONDS", 0.1)
    with (
        pytest.raises(OutputError) as refused,
        whole_file.alone(tmp_path),
    ):
        raise AssertionError
    assert str(refused.value) == (
        f"{tmp_path}: locked by {ME} for 0 s; nothing was written; wait until that is done, or end it, and try again"
    )
    assert caplog.messages == [f"{tmp_path}: locked by {ME}; waiting for at most 0.1 s"]
    fcntl.flock(reader, fcntl.LOCK_UN)
    with whole_file.alone(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_writer_goes_on_when_the_lock_is_gone(
    tmp_path: Path, reader: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(whole_file.time, "sleep", lambda _: fcntl.flock(reader, fcntl.LOCK_UN))
    with whole_file.alone(tmp_path):
        pass
    assert caplog.messages == [], "nothing is said of a short wait"


def test_a_folder_that_cannot_be_locked_is_written_all_the_same(tmp_path: Path) -> None:
    with whole_file.alone(tmp_path / "none"):
        pass


def test_holders_that_the_system_does_not_tell(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert whole_file.lock_holders(file.fileno()) == "another process"
