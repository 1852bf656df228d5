"""What benchmarks keep from run to run, models and bundles, is of the sources that they measure."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

CACHE = Path(".cache/bench")
_PACKAGE = Path(__file__).parents[1]
_MEASURED = ("compiler", "exporters", "profiles", "runtime")
_MARK = "sources.sha256"


def forget_what_others_made(folder: Path, package: Path = _PACKAGE) -> bool:
    """Empties ``folder`` where other sources of ``package`` filled it; returns whether there was anything to remove."""
    mark, sources = folder / _MARK, sources_digest(package)
    if mark.exists() and mark.read_text() == sources:
        return False
    found = folder.exists() and any(folder.iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark.write_text(sources)
    return found


def sources_digest(package: Path) -> str:
    """The SHA-256 of the modules that compile and answer, names and text; not of the tools around them."""
    files = [path for room in _MEASURED for path in package.joinpath(room).rglob("*.py")]
    total = hashlib.sha256()
    for path in sorted([*files, *package.glob("*.py")]):
        total.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return total.hexdigest()
