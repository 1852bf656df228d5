"""The model card: what the first lines of a folder's README.md state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...outside_file import read_file
from ...profiles.strict_yaml import parse_yaml

CARD = "README.md"
_LIMIT = "---"
_MAX_BYTES = 2**24


def read_card(folder: Path, keys: Collection[str]) -> Mapping[str, Any]:
    """Those of ``keys`` that stand between two lines ``---`` at the start of a card; none where there is no card, or it
    begins otherwise. The other keys, which may be results of benchmarks in thousands of lines, are not read. Raises
    CheckpointError for values that are no YAML."""
    path = folder / CARD
    if not path.is_file():
        return {}
    lines = read_file(path, _MAX_BYTES, CheckpointError).decode(errors="replace").splitlines()
    if lines[:1] != [_LIMIT] or _LIMIT not in lines[1:]:
        return {}
    wanted, is_wanted = list[str](), False
    for line in lines[1 : lines.index(_LIMIT, 1)]:
        if line[:1] not in (" ", "-", "", "#"):  # a key, behind which its value is indented, or a list
            is_wanted = line.partition(":")[0] in keys
        if is_wanted:
            wanted.append(line)
    found = parse_yaml("\n".join(wanted), path, CheckpointError)
    return found if isinstance(found, dict) else {}
