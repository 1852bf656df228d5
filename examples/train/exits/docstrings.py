"""Prose that every development environment has: the docstrings of its own packages. Parsed, never imported."""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_SHORTEST = 30  # characters of a paragraph
_PROSE = re.compile(r"[A-Z](?!.*>>>).*[.!?]")  # begins and ends like prose; no console transcript


@dataclass(frozen=True)
class Source:
    """One class of the task: a label, the import package its texts come from (None is the standard library), and a
    pattern of that package's own names."""

    label: str
    package: str | None
    own_names: str

    def folder(self) -> Path | None:
        """Where the package lies, found without running any of its code; None if it is not installed."""
        if self.package is None:
            return Path(sysconfig.get_path("stdlib"))
        spec = find_spec(self.package)
        places = spec.submodule_search_locations if spec else None
        return Path(next(iter(places))) if places else None


# Packages that the pinned development environment brings, each with a subject of its own, and the standard library.
SOURCES = (
    Source("stdlib", None, r"standard library|cpython"),
    Source("huggingface_hub", "huggingface_hub", r"hugging ?face"),
    Source("hypothesis", "hypothesis", r"\bhypothesis\b"),
    Source("mypy", "mypy", r"mypy"),
    Source("networkx", "networkx", r"networkx|\bnx\."),
    Source("numpy", "numpy", r"numpy|\bnp\."),
    Source("pydantic", "pydantic", r"pydantic"),
    Source("rich", "rich", r"\brich\b"),
    Source("sympy", "sympy", r"sympy"),
    Source("torch", "torch", r"torch"),
    Source("transformers", "transformers", r"transformers"),
)


def docstrings(file: Path) -> Iterator[list[str]]:
    """The prose paragraphs of every docstring in ``file`` that has any, each paragraph on one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are the package's business
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # packages ship templates that are no Python
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            joined = (" ".join(part.split()) for part in (ast.get_docstring(node) or "").split("\n\n"))
            prose = [text for text in joined if _is_prose(text)]
            if prose:
                yield prose


def _is_prose(text: str) -> bool:
    return len(text) >= _SHORTEST and text.isprintable() and bool(_PROSE.fullmatch(text))
