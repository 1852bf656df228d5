from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.errors import BundleCorruptError, InputError, NestforgeError
from nestforge.outside import library_errors, printable, said_by


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("é ² 10.² 中", "é ² 10.² 中"),
        ("a\nnestforge: error: b", r"a\nnestforge: error: b"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\ud800", r"\ud800"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("\x9b31m\u2028\x00", r"\x9b31m\u2028\x00"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_cannot_be_printed_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters()), st.integers(20, 100))
def test_printable_text_is_one_line_of_bounded_length(text: str, most: int) -> None:
    short = printable(text, most)
    assert short.isprintable()
    assert len(short) <= most
    short.encode()
    if text.isprintable() and len(text) <= most:
        assert short == text


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    short = printable("where: " + "x" * 5000 + "; what to do", 60)
    assert len(short) == 60
    assert short.startswith("where: xxx")
    assert " ... " in short
    assert short.endswith("; what to do")


def test_every_error_of_ours_is_one_printable_line() -> None:
    failure = BundleCorruptError("tensor a\nb\x1b[1m\ud800: missing")
    assert str(failure) == r"tensor a\nb\x1b[1m\ud800: missing"
    assert isinstance(failure, NestforgeError)
    assert len(str(InputError("y" * 100_000))) == 800


class Panic(BaseException):
    pass


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (RuntimeError("first line\nsecond"), "first line"),
        (ValueError(""), "ValueError"),
        (Panic("index out of bounds"), "index out of bounds"),
        (MemoryError(), "MemoryError"),
        (UnicodeDecodeError("utf-8", b"bad node \xff name", 9, 10, "invalid start byte"), "bad node \ufffd name"),
    ],
)
def test_what_a_library_raises_becomes_ours(raised: BaseException, said: str) -> None:
    with pytest.raises(InputError) as caught, library_errors(lambda text: InputError(f"engine e: {text}")):
        raise raised
    assert str(caught.value) == f"engine e: {said}"
    assert caught.value.__cause__ is raised
    assert said_by(raised) == said


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_is_not_a_librarys(end: type[BaseException]) -> None:
    with pytest.raises(end), library_errors(InputError):
        raise end
