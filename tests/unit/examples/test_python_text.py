"""Which sources are read, and in which part of a split a name falls."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.errors import CheckpointError
from nestforge.examples.python_text import (
    PARTS,
    Part,
    byte_tokenizer,
    docstrings,
    module_files,
    part_of,
    place_of,
    read_python_parts,
)
from tokenizers import Tokenizer


def test_modules_sorted_without_tests_and_vendored_code(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "tests/t.py", "a/_vendor/v.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in module_files(tmp_path)] == ["a/z.py", "b.py"]


def test_places_are_fixed_and_cover_the_hundred() -> None:
    assert [place_of(name) for name in ("argparse", "email", "json")] == [76, 7, 19]
    assert {place_of(f"module{n}") for n in range(2000)} == set(range(100))


LICENCE = "# " + "This block stands in many files and is long enough to be no idiom. " * 2
LEAST: dict[Part, int] = {"train": 17, "validation": 68, "test": 68}


def test_a_file_is_in_the_part_of_its_top_level_module(stdlib: Path) -> None:
    parts = read_python_parts(LEAST, stdlib)
    for number in range(40):
        name = f"module{number}"
        holding = [part for part in PARTS if f"function_{number}_0(".encode() in parts[part]]
        assert holding == [part_of(name)]
    assert {part_of(f"module{number}") for number in range(40)} == set(PARTS)


def test_files_of_a_package_stay_together(stdlib: Path) -> None:
    held_out = next(f"package{n}" for n in range(1000) if part_of(f"package{n}") == "test")
    for name in ("one.py", "deep/two.py"):
        (stdlib / held_out / name).parent.mkdir(parents=True, exist_ok=True)
        (stdlib / held_out / name).write_text(f"# of the package: {name}\n")
    text = read_python_parts(LEAST, stdlib)["test"]
    assert b"of the package: one.py" in text
    assert b"of the package: deep/two.py" in text


def test_blocks_of_several_modules_are_in_no_held_out_part(stdlib: Path) -> None:
    for number in range(40):
        file = stdlib / f"module{number}.py"
        file.write_text(f"{LICENCE}\n\n{file.read_text()}\n\nif shared_idiom:\n    pass\n")
    parts = read_python_parts(LEAST, stdlib)
    assert [parts[part].count(b"no idiom") > 0 for part in PARTS] == [True, False, False]
    assert all(b"if shared_idiom:\n    pass" in parts[part] for part in PARTS)  # short blocks stay
    assert all(parts[part].count(b"def function_") % 8 == 0 for part in PARTS)  # and so does what follows


def test_generated_tables_and_undecodable_files_are_left_out(stdlib: Path) -> None:
    before = read_python_parts(LEAST, stdlib)
    for name in ("encodings/table.py", "pydoc_data/topics.py", "_sysconfigdata_x.py", "tests/t.py"):
        (stdlib / name).parent.mkdir(exist_ok=True)
        (stdlib / name).write_text("table = 1\n")
    (stdlib / "latin.py").write_bytes(b"# \xe4\xf6\xfc\n")
    assert read_python_parts(LEAST, stdlib) == before


def test_texts_are_tidied_first(stdlib: Path) -> None:
    plain, loud = read_python_parts(LEAST, stdlib), read_python_parts(LEAST, stdlib, bytes.upper)
    assert loud == {part: text.upper() for part, text in plain.items()}


def test_too_few_sources_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"0 bytes of Python for the train part, expected at least 17; train with"
    ):
        read_python_parts(LEAST, tmp_path)


TOKENIZER = Tokenizer.from_str(byte_tokenizer().to_str())


@given(st.text())
def test_text_to_bytes_and_back(text: str) -> None:
    encoded = TOKENIZER.encode(text)
    assert bytes(encoded.ids) == text.encode()
    assert TOKENIZER.decode(encoded.ids) == text


def test_every_byte_has_a_token() -> None:
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(256))


def test_special_tokens_come_after_the_bytes() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer(["[MASK]"]).to_str())
    assert tokenizer.encode("a[MASK]b").ids == [97, 256, 98]


@pytest.mark.parametrize("source", [b"def (", b"\xff\xfe\x00", b'"\\d"  # an invalid escape'])
def test_what_is_no_python_has_no_docstrings(tmp_path: Path, source: bytes) -> None:
    (tmp_path / "template.py").write_bytes(source)
    assert list(docstrings(tmp_path / "template.py", 30)) == []
