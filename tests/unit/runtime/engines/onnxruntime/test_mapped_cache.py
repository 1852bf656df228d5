from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
from nestforge.bundle.open_bundle import Bundle
from nestforge.errors import OutputError
from nestforge.profiles.probe_host import cache_folder
from nestforge.runtime.engines.onnxruntime.mapped_cache import drop_mapped, is_mapped, mapped_engine
from nestforge.whole_file import folder_beside
from support.processes import die, killed


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nestforge" / "mapped"


@pytest.fixture
def mapped(bundle: Bundle) -> Callable[..., Path]:
    """``mapped(build, index=0)``: the packed form of one of the bundle's engines."""
    return lambda build, index=0: mapped_engine(bundle, bundle.manifest.engines[index], build)


def test_builds_once_per_engine(cache: Path, mapped: Callable[..., Path]) -> None:
    build = Builder()
    path = mapped(build)
    assert path == mapped(build)
    assert (path.read_bytes(), build.calls) == (b"graph", 1)
    assert mapped(build, 1) != path
    assert build.calls == 2


def test_lies_in_the_projects_one_cache_and_is_private(cache: Path, mapped: Callable[..., Path]) -> None:
    assert mapped(Builder()).parents[1] == cache
    assert cache.parent == cache_folder()
    assert [folder.stat().st_mode & 0o777 for folder in (cache, cache.parent)] == [0o700, 0o700]


def test_a_new_entry_sweeps_out_what_nobody_will_read(cache: Path, mapped: Callable[..., Path]) -> None:
    kept = mapped(Builder())
    other = cache / "1.0.0-abc"
    other.mkdir()
    (other / "engine.bin").write_bytes(b"old")
    killed(lambda: mapped(die, 1))
    assert len(list(cache.iterdir())) == 4
    with folder_beside(cache) as building:  # which removes what was killed
        mapped(Builder())  # nothing is built, so nothing is swept
        assert len(list(cache.iterdir())) == 4
        new = mapped(Builder(), 1)
        assert {path for path in cache.iterdir() if not path.name.startswith(".")} == {kept.parent, new.parent}
        assert building.exists()
    assert set(cache.iterdir()) == {kept.parent, new.parent}
    assert kept.parent.name.startswith(f"{onnxruntime.__version__}-")


def test_drops_the_entry_of_one_engine(bundle: Bundle, mapped: Callable[..., Path]) -> None:
    first, second = bundle.manifest.engines[:2]
    drop_mapped(bundle, first)  # there is none yet
    folder = mapped(Builder()).parent
    mapped(Builder(), 1)
    assert is_mapped(bundle, first)
    drop_mapped(bundle, first)
    assert (is_mapped(bundle, first), is_mapped(bundle, second), folder.exists()) == (False, True, False)


@pytest.mark.parametrize("change", ["edit", "remove", "add", "receipt"])
def test_builds_again_what_is_not_as_saved(change: str, mapped: Callable[..., Path]) -> None:
    build = Builder()
    folder = mapped(build).parent
    if change == "edit":
        (folder / "engine.bin").write_bytes(b"weighty")
    elif change == "remove":
        (folder / "engine.bin").unlink()
    elif change == "add":
        (folder / "more.bin").write_bytes(b"")
    else:
        (folder / "receipt.json").write_text("[")
    mapped(build)
    assert build.calls == 2
    assert sorted(path.name for path in folder.iterdir()) == ["engine.bin", "engine.onnx", "receipt.json"]
    assert (folder / "engine.bin").read_bytes() == b"weights"


def test_a_failed_build_leaves_nothing(cache: Path, mapped: Callable[..., Path]) -> None:
    def fail(target: Path, _: str) -> None:
        target.write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mapped(fail)
    assert list(cache.iterdir()) == []


def test_a_full_disk_is_one_clear_line(mapped: Callable[..., Path]) -> None:
    def fill(target: Path, _: str) -> None:
        raise OSError(28, "No space left on device", str(target))

    with pytest.raises(OutputError, match=r"cache of mapped engines: No space left on device .* free some space"):
        mapped(fill)


def test_a_cache_that_others_can_read_is_refused(cache: Path, bundle: Bundle, mapped: Callable[..., Path]) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o755)
    with pytest.raises(OutputError, match="others may read or change it; make it yours alone"):
        mapped(Builder())
    with pytest.raises(OutputError, match="others may read or change it"):
        drop_mapped(bundle, bundle.manifest.engines[0])


def test_when_another_process_was_first_its_entry_is_used(mapped: Callable[..., Path]) -> None:
    def slow(target: Path, weights_name: str) -> None:
        Builder(b"late")(target, weights_name)
        mapped(Builder(b"first"))  # as if built meanwhile

    assert mapped(slow).read_bytes() == b"first"
