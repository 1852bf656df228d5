"""Which sources are read, and in which part of a split a name falls."""

from __future__ import annotations

from pathlib import Path

from nestforge.examples.train.python_sources import module_files, place_of


def test_modules_sorted_without_tests_and_vendored_code(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "tests/t.py", "a/_vendor/v.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in module_files(tmp_path)] == ["a/z.py", "b.py"]


def test_places_are_fixed_and_cover_the_hundred() -> None:
    assert [place_of(name) for name in ("argparse", "email", "json")] == [76, 7, 19]
    assert {place_of(f"module{n}") for n in range(2000)} == set(range(100))
