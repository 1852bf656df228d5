"""The line of a model's own code at which something happened to it; what libraries ran below it is no help."""

import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

# The root of the package may be that of a checkout, which has more in it.
_ROOT = Path(__file__).parents[1]
_OURS = tuple(f"{path.parent}/" for path in _ROOT.glob("*/__init__.py"))
_INSTALLED, _STANDARD = "site-packages", sysconfig.get_path("stdlib")
_MOST_SHOWN = 80


def own_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """`` at net.py:29 (if y.sum() > 0:)``, of the last of ``frames`` that is in code of the user's, else in a model of
    an installed library; nothing where none is."""
    theirs = [frame for frame in frames if not _is_nobodys(frame.filename)]
    users = [f for f in theirs if _INSTALLED not in f.filename]
    models = [f for f in theirs if "/models/" in f.filename]
    for frame in (users or models or theirs)[-1:]:
        code = f" ({frame.line[:_MOST_SHOWN]})" if frame.line else ""
        return f" at {frame.filename.rpartition('/')[2]}:{frame.lineno}{code}"
    return ""


def _is_nobodys(file: str) -> bool:
    """Whether a file is ours, PyTorch's or Python's."""
    return (
        file.startswith((*_OURS, "<frozen"))
        or Path(file).parent == _ROOT
        or "/torch/" in file
        or (file.startswith(_STANDARD) and _INSTALLED not in file)
    )


def line_of(failure: BaseException) -> str:
    """``own_line`` of where ``failure`` was raised."""
    return own_line(traceback.extract_tb(failure.__traceback__))
