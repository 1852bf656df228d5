"""Text that every development environment has: the Python sources of its packages. Read, never imported."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ..errors import CheckpointError

_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("_vendor", "__pycache__", "__phello__"),  # vendored code is another package's
}


def module_files(folder: Path) -> list[Path]:
    """Every Python file below ``folder``, sorted, without tests and vendored packages."""
    files = folder.rglob("*.py")
    return sorted(path for path in files if not _SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts))


_PROSE = re.compile(r"[A-Z](?!.*>>>).*[.!?]")  # begins and ends like prose; no console transcript


def docstrings(file: Path, shortest: int) -> Iterator[list[str]]:
    """The prose paragraphs, of ``shortest`` characters at least, of every docstring in ``file`` that has any, each on
    one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are the package's business
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # packages ship templates that are no Python
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            joined = (" ".join(part.split()) for part in (ast.get_docstring(node) or "").split("\n\n"))
            prose = [text for text in joined if len(text) >= shortest and text.isprintable() and _PROSE.fullmatch(text)]
            if prose:
                yield prose


def place_of(name: str) -> int:
    """0 to 99 by the hash of ``name``: what decides its part of a split, on every machine alike."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100


Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")

_HELD_OUT_PLACES = {"validation": range(10), "test": range(10, 20)}  # of every hundred modules
_GENERATED = re.compile(r"encodings|pydoc_data|_sysconfigdata.*")
_BLOCK = 80  # bytes; shorter blocks, such as `if __name__ == ...`, are idiom


def read_python_parts(
    least: Mapping[Part, int], stdlib: Path | None = None, tidy: Callable[[bytes], bytes] = bytes
) -> dict[Part, bytes]:
    """The sources below ``stdlib``, by default the running Python's. The same sources give the same parts.

    ``tidy`` is done to the text of every file before anything else.
    Raises CheckpointError if a part would have fewer bytes than its ``least``.
    """
    folder = stdlib or Path(sysconfig.get_path("stdlib"))
    units: dict[str, list[bytes]] = defaultdict(list)
    for file in module_files(folder):
        name = file.relative_to(folder).parts[0].removesuffix(".py")
        text = file.read_bytes()
        if not _GENERATED.fullmatch(name) and _is_utf8(text):
            units[name].append(tidy(text).strip() + b"\n\n")
    shared = _shared_blocks(units)
    parts: dict[Part, bytes] = {}
    for part in PARTS:
        texts = [text for name in sorted(units) if part_of(name) == part for text in units[name]]
        parts[part] = b"".join(texts if part == "train" else (_without(text, shared) for text in texts))
        if len(parts[part]) < least[part]:
            raise CheckpointError(
                f"{folder}: {len(parts[part])} bytes of Python for the {part} part, expected at least {least[part]}; "
                "train with a Python that has the sources of its standard library"
            )
    return parts


def part_of(module: str) -> Part:
    """The part of every file of a top-level ``module``."""
    place = place_of(module)
    for part in PARTS[1:]:
        if place in _HELD_OUT_PLACES[part]:
            return part
    return "train"


def _shared_blocks(units: dict[str, list[bytes]]) -> set[bytes]:
    found: Counter[bytes] = Counter()
    for texts in units.values():
        found.update({block for text in texts for block in _blocks(text)})
    return {block for block, count in found.items() if count > 1 and len(block) >= _BLOCK}


def _blocks(text: bytes) -> list[bytes]:
    return [block.strip() for block in re.split(rb"\n\s*\n", text)]


def _without(text: bytes, blocks: set[bytes]) -> bytes:
    return b"".join(piece for piece in re.split(rb"(?<=\n)(?=\s*\n)", text) if piece.strip() not in blocks)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def byte_tokenizer(special: Sequence[str] = ()) -> Tokenizer:
    """256 ids, no merges, and the ``special`` tokens from 256 on. Pad with 0, which no source contains."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _symbols() -> list[str]:
    """The character for which byte-level tokenizers take each byte: itself if it prints, else one from 256 on."""
    printing = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]
