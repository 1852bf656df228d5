"""A list of tasks and their files, whenever its writer is interrupted."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from nestforge import whole_file
from nestforge.bundle.device_files.task_index import read_tasks, save_task_entry, task_file
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import OutputError
from support.processes import needs_root, nobody

GOLDEN = Path(__file__).parents[3] / "golden" / "bundle-tasks"


@pytest.mark.parametrize(("stopped_at", "is_listed"), [(1, False), (2, True)])
def test_an_interrupt_leaves_the_file_of_a_listed_task_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: int, is_listed: bool
) -> None:
    """The names of the task's file and of the list are there before each waits for the disk."""
    bundle = open_bundle(shutil.copytree(GOLDEN, tmp_path / "b"))
    before = read_tasks(bundle)
    data = (bundle.path / before[0].file).read_bytes()
    task = replace(before[0], name="new", file=task_file("new", data))
    calls, sync = [], whole_file.sync_folder

    def stopped(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == stopped_at:
            raise KeyboardInterrupt
        sync(folder)

    monkeypatch.setattr(whole_file, "sync_folder", stopped)
    with pytest.raises(KeyboardInterrupt):
        save_task_entry(bundle, task, data)
    assert (task.name in {one.name for one in read_tasks(bundle)}) is is_listed
    assert (bundle.path / task.file).exists() is is_listed


@needs_root
def test_a_read_only_file_system_is_one_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a system refuses to remove even a file that is not there."""
    bundle = open_bundle(shutil.copytree(GOLDEN, tmp_path / "b"))
    one = read_tasks(bundle)[0]
    data = (bundle.path / one.file).read_bytes()

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    with nobody(bundle.path), pytest.raises(OutputError, match="task new was not saved"):
        save_task_entry(bundle, replace(one, name="new", file=task_file("new", data)), data)
