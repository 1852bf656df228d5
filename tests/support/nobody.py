"""A block of a test that runs as a user without rights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")


@contextmanager
def nobody(*readable: Path) -> Iterator[None]:
    """As a user without rights, who may read ``readable`` and what is in it."""
    modes = {each: each.stat().st_mode for path in readable for each in (path, *path.parents, *path.glob("*"))}
    for each, mode in modes.items():
        each.chmod(mode | (0o055 if each.is_dir() else 0o044))
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        for each, mode in modes.items():
            each.chmod(mode)
