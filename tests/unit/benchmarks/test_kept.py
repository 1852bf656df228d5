from __future__ import annotations

from pathlib import Path

from nestforge.benchmarks.kept import forget_what_others_made


def test_what_is_kept_is_of_the_sources(tmp_path: Path) -> None:
    package, kept = tmp_path / "package", tmp_path / "kept"
    (package / "compiler").mkdir(parents=True)
    (package / "tools").mkdir()
    source = package / "compiler" / "one.py"
    source.write_text("a = 1\n")
    assert not forget_what_others_made(kept, package)

    (kept / "some.bundle").mkdir()
    (package / "tools" / "bench.py").write_text("")
    assert not forget_what_others_made(kept, package)
    assert (kept / "some.bundle").exists()

    source.write_text("a = 2\n")
    assert forget_what_others_made(kept, package)
    assert not (kept / "some.bundle").exists()
    assert not forget_what_others_made(kept, package)


def test_a_folder_without_a_mark_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "kept" / "old.bundle").mkdir(parents=True)
    (tmp_path / "package").mkdir()
    assert forget_what_others_made(tmp_path / "kept", tmp_path / "package")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["sources.sha256"]
