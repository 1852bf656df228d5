from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.errors import OutputError
from nestforge.runtime.mapped_cache import cache_folder, mapped_engine

KEY = {"engine": "e", "weights": "w"}


class Builder:
    """Writes an engine and counts how often."""

    def __init__(self, graph: bytes = b"graph") -> None:
        self.calls = 0
        self.graph = graph

    def __call__(self, target: Path, weights_name: str) -> None:
        self.calls += 1
        target.write_bytes(self.graph)
        (target.parent / weights_name).write_bytes(b"weights")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_folder()


def test_lies_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / "nestforge" / "mapped"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "nestforge" / "mapped"


def test_builds_once_per_key(cache: Path) -> None:
    build = Builder()
    path = mapped_engine(KEY, build)
    assert path == mapped_engine(dict(reversed(KEY.items())), build)
    assert (path.read_bytes(), build.calls) == (b"graph", 1)
    assert mapped_engine({**KEY, "weights": "other"}, build) != path
    assert build.calls == 2
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("change", ["edit", "remove", "add", "receipt"])
def test_builds_again_what_is_not_as_saved(change: str) -> None:
    build = Builder()
    folder = mapped_engine(KEY, build).parent
    if change == "edit":
        (folder / "engine.bin").write_bytes(b"weighty")
    elif change == "remove":
        (folder / "engine.bin").unlink()
    elif change == "add":
        (folder / "more.bin").write_bytes(b"")
    else:
        (folder / "receipt.json").write_text("[")
    mapped_engine(KEY, build)
    assert build.calls == 2
    assert sorted(path.name for path in folder.iterdir()) == ["engine.bin", "engine.onnx", "receipt.json"]
    assert (folder / "engine.bin").read_bytes() == b"weights"


def test_a_failed_build_leaves_nothing(cache: Path) -> None:
    def fail(target: Path, _: str) -> None:
        target.write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mapped_engine(KEY, fail)
    assert list(cache.iterdir()) == []


def test_a_full_disk_is_one_clear_line() -> None:
    def fill(target: Path, _: str) -> None:
        raise OSError(28, "No space left on device", str(target))

    with pytest.raises(OutputError, match=r"cache of mapped engines: No space left on device .* free some space"):
        mapped_engine(KEY, fill)


def test_a_cache_that_others_can_read_is_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o755)
    with pytest.raises(OutputError, match="others may change it; make it yours alone"):
        mapped_engine(KEY, Builder())


def test_when_another_process_was_first_its_entry_is_used() -> None:
    def slow(target: Path, weights_name: str) -> None:
        Builder(b"late")(target, weights_name)
        mapped_engine(KEY, Builder(b"first"))  # as if built meanwhile

    assert mapped_engine(KEY, slow).read_bytes() == b"first"
