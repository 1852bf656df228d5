"""Folders that the processes of a test run share: each is made once, by whichever of them needs it first."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """The folder ``name`` of the run, empty at first."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder ``name`` of the run with what ``make(folder)`` writes there, only to be read. One process makes it,
    while others that need it wait."""
    folder = shared_folder(factory, name)
    made = folder / "made"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            shutil.rmtree(made, ignore_errors=True)  # of a process that failed half-way
            made.mkdir()
            make(made)
            (folder / "whole").touch()
    return made
