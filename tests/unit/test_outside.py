"""Text from outside, and files of users: read whole, as JSON, or refused; and what lies in the place of another."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleCorruptError, BundleFormatError, CheckpointError, InputError, NestforgeError
from nestforge.exporters.checkpoints.checkpoint import open_checkpoint
from nestforge.outside import library_errors, printable, said_by
from nestforge.outside_file import folder_problem, parse_json, read_file, read_json


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


NO_FILE = "expected a file, not a folder, a pipe or a device"


def refusal(path: Path, max_bytes: int = 8) -> str:
    with pytest.raises(CheckpointError) as error:
        read_file(path, max_bytes, CheckpointError)
    return str(error.value).removeprefix(f"{path}: ")


def test_a_file_is_read_whole_through_a_link_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345678")
    (tmp_path / "link").symlink_to("a")
    assert read_file(tmp_path / "link", 8, CheckpointError) == b"12345678"
    assert refusal(tmp_path / "link", 7) == "8 bytes, more than the 7 allowed"


def test_what_has_no_end_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "endless", tmp_path):
        assert refusal(path) == NO_FILE


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == "cannot be read (No such file or directory)"
    assert refusal(tmp_path / "a\0b").endswith("cannot be read (embedded null byte)")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    assert refusal(tmp_path / "sparse") == "1099511627776 bytes, more than the 8 allowed"


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        "[NaN]",
        "[-Infinity]",
        "[" * 900 + "]" * 900,
        '{"a":' * 65 + "1" + "}" * 65,
        "[" * 200_000,
        '"\xff'.encode("latin-1"),
        "9" * 5000,
        "",
    ],
)
def test_json_that_is_none_or_too_deep_is_a_value_error(text: str | bytes) -> None:
    raw = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(ValueError):
        parse_json(raw)


def test_json_of_other_programs_may_repeat_keys_and_have_constants() -> None:
    assert parse_json(b'{"a": 1, "a": [Infinity]}', strict=False) == {"a": [float("inf")]}
    with pytest.raises(ValueError, match="within more than 64 others"):
        parse_json("[" * 65 + "]" * 65, strict=False)
    assert parse_json("[" * 64 + "]" * 64) == parse_json("[" * 64 + "]" * 64, strict=False)
    assert parse_json("7") == 7


def made(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.onnx", "an ONNX graph, .* takes the model's own folder"),
        ("model.safetensors", "a file of a model folder; give the folder: .*/there$"),
        ("config.json", "a file of a model folder; give the folder: .*/there$"),
        ("manifest.json", "a file of a bundle; give the folder: .*/there$"),
        ("weights.bin", "pickled weights, which are refused"),
    ],
)
def test_a_file_says_what_it_is_wherever_it_is_given(tmp_path: Path, name: str, said: str) -> None:
    file = made(tmp_path / "there", name) / name
    with pytest.raises(BundleFormatError, match=rf"bundle {file}: is {said}"):
        open_bundle(file)
    with pytest.raises(CheckpointError, match=rf"model {file}: is {said}"):
        open_checkpoint(file)


def test_a_model_folder_is_no_bundle_and_a_bundle_no_model(tmp_path: Path) -> None:
    model, bundle = made(tmp_path / "m", "config.json"), made(tmp_path / "b", "manifest.json")
    with pytest.raises(BundleFormatError, match=f"is a model folder; `nestforge compile {model} --output my.bundle`"):
        open_bundle(model)
    with pytest.raises(CheckpointError, match=f"model {bundle}: is a bundle, which `nestforge run`"):
        open_checkpoint(bundle)
    with pytest.raises(CheckpointError, match=r"is an adapter of PEFT; .*--task NAME="):
        open_checkpoint(made(tmp_path / "a", "adapter_config.json"))


def test_nothing_is_said_of_what_no_command_knows(tmp_path: Path) -> None:
    assert folder_problem("model", tmp_path) is None
    assert "no such folder" in str(folder_problem("model", made(tmp_path, "a.txt") / "a.txt"))


@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", "expected a JSON object, got list"), ("{", "not JSON (Expecting property name"), ("[" * 65, "not JSON")],
)
def test_json_of_a_file_is_an_object(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(f"a.json: {said}")):
        read_json(tmp_path / "a.json", CheckpointError)


def test_an_id_of_the_hub_is_answered_with_the_command_that_makes_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compiling = "`nestforge compile hub:intfloat/e5-small --output "
    with pytest.raises(
        BundleFormatError, match=rf"bundle intfloat/e5-small: not a folder; .*{compiling}e5-small.bundle`"
    ):
        open_bundle("intfloat/e5-small")
    (tmp_path / "intfloat").mkdir()  # then it is a path
    with pytest.raises(BundleFormatError, match=r"not a folder; expected one that `nestforge compile` wrote$"):
        open_bundle("intfloat/e5-small")
